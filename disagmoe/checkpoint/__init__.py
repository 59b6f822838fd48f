"""Checkpoints: the unsplit model's state, saved by any layout and loaded by any other.

folder.py        names, manifests, which checkpoints there are and whether they are whole: without torch
resume.py        which one a run continues from, and whether it may: without torch
state.py         what a process holds, by the unsplit model's names; who writes what
storage.py       the same for torch.distributed.checkpoint: planners, a writer that commits, reading
checkpointer.py  saving beside training, restoring, keeping the latest
convert.py commands.py   `disagmoe checkpoint`
"""
