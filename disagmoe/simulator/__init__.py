"""One discrete-event engine for the schedules that the runtime executes and for the systems they are compared with.

    costs.py      what a stage and a hop cost; workers that differ
    routing.py    expected rows and bytes of a transfer
    roofline.py   costs from shapes, layout and cluster
    profile.py    costs from a measured run
    network.py    links that serve in order or share fairly
    engine.py     programs on compute engines and links
    result.py     makespan, bubble, exposed communication, memory, critical path
    chunks.py     interleaved 1F1B and DualPipeV as orders of layers' chunks, spelt out as stages
    overlap.py    closed forms of operator-level overlap (Tutel, Comet)
    systems.py    AF-Pipe and the baselines, each with its assumptions
    report.py     table, picture and trace

Never imports torch; docs/simulator.md is the manual.
"""

from __future__ import annotations
