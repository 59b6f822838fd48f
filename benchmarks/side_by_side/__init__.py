"""Training systems compared by wall-clock time on an emulated cluster; see docs/speed.md."""
