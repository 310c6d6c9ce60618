"""From a Hugging Face checkpoint to a container.

checkpoint  the folder: shards, names, raw rows
plan        which rows of which tensor make which part of the container
quantize    rows to bytes, and the report of what that cost
convert     all of it, streaming and resumable
resolve     what a user calls MODEL: a container, a checkpoint (converted once, into the cache), the demo, a hub id
"""
