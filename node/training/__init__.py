"""What happens in a trainer process, and how the agent speaks with one.

`corpus`, `link`, `packing`, `presets`, `process`, `schedule`, `shards`, `shared` and `tokenizer` are for the agent too
and load no torch; the others belong to the trainer and to the tool processes.
"""
