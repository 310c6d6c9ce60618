"""The model on disk: a folder of safetensors files whose bytes are what the CPU and the cards compute from.

layout    bytes of matrices and slabs, arithmetic only
schema    which tensors a model of a given configuration has
header    safetensors headers, read and made
manifest  coli.json
writer    streaming and resumable      reader   memory-mapped and strict      verify   checksums and scans
"""
