"""Measurements that write tables of docs/: `python -m benchmarks.NAME`."""
