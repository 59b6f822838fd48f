"""Published weights: which tensors there must be, reading them into any part of a model, writing them.

`maps` is names and shapes; `files` looks into a folder of safetensors and accounts for every tensor; `load` fills
modules; `write` makes files; `mxfp4` decodes. A file a family lists its parameters and is reached from its recipe.
"""
