"""Checkpoints: JSON and safetensors without pickle, in one format for one process and for several ranks.

what is saved
    state            state of a trainer: collecting it, checking it and loading it
    resume_settings  settings of the run, compared with those of the script on resume; frozen parameters that are left
                     out with save="trained", and their checksums
how it is written and read
    encoding         nested state <-> JSON values and named tensors; checks of keys and types in a nested state
    format           the files of a checkpoint: state.json, model.safetensors and one safetensors file per rank; which
                     rank writes which chunk of a tensor, and how tensors are assembled
    io               writing a checkpoint atomically, also in the background; reading it
which exist
    directory        the checkpoints of a run; `sw.load_checkpoint`
    trained          the models in the checkpoints of runs, for passes over a dataset without training
"""
