"""Expert parallelism without disaggregation: the baselines that AF-Pipe is compared with.

`rows` plans what travels (pure functions), `exchange` moves it, `moe` and `stock` compute one layer's routed experts,
`chunk` runs the layers of one chunk, `runtime` walks a pipeline rank's order of chunks, `apply` puts it all together.
"""
