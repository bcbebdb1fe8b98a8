"""Checkpoints: JSON and safetensors without pickle, in one format for one process and for several ranks.

what is saved
    state       state of a trainer: collecting it, checking it and loading it
    settings    settings of the run, compared with those of the script on resume
    base        frozen parameters that are left out with save="trained", and their checksums
how it is written and read
    encoding    nested state <-> JSON values and named tensors
    format      the files of a checkpoint directory: state.json, model.safetensors and one safetensors file per rank
    sharding    which rank writes which chunk of a tensor, and how tensors are assembled
    storage     writing a directory atomically, also in the background; reading it
    schema      checks of keys and types in a nested state
which exist
    store       the checkpoints of a run; `sw.load_checkpoint`
"""
