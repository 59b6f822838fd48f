"""From a model and a cluster to a layout: how many workers and how much network each role gets, and how deep it is.

    question.py      what is asked: job, cluster, what is pinned; candidates; the runtime's rules
    memory.py        bytes of the heaviest worker of each group
    tables.py        the cost records of the simulator as tables over depths and workers; the bound of a step
    milp.py          the exact minimum of that bound, with OR-Tools
    candidates.py    everything near that minimum
    evaluate.py      costs, memory and bound of one candidate, and its simulation
    search.py        candidates by bound, simulated until no other can win
    paper.py         the paper's own objective
    diagnose.py      why nothing fits, and what would
    local_search.py  on measured step times
    output.py plot.py  TOML, table, pictures

Never imports torch; docs/allocation.md is the manual.
"""

from __future__ import annotations
