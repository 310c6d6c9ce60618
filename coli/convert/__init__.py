"""From a Hugging Face checkpoint, or a GGUF file, to a container.

checkpoint  the folder: shards, names, raw rows
gguf        a GGUF file as such a checkpoint (gguf_file, _names, _config, _tokenizer: its parts)
plan        which rows of which tensor make which part of the container
quantize    rows to bytes, and the report of what that cost
convert     all of it, streaming and resumable
resolve     what a user calls MODEL: a container, a checkpoint or GGUF file (converted once, into the cache), the demo,
            a hub id
"""
