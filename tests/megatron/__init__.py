"""The stock Megatron engines of verl on CPU. README.md in this folder says how to use them for a new bug."""
