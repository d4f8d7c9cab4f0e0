"""What runs in processes of its own; each function answers with plain data. See tests.processes.call."""
