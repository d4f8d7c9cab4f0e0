"""Runnable demonstrations: verl's stock engines on a machine without an accelerator."""
