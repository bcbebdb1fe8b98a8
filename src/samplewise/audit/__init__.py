"""`sw.audit`: the weight of every sample and target in the updates of a training loop, and faults of the loop.

observer      hooks on modules, outputs and optimizers; calls, backward passes and updates
accumulation  backward passes that are in `.grad`
weights       weights of targets, from outputs and the gradient of the loss with respect to them
records       what is recorded: microbatches, updates, rows
findings      faults, each with a sentence
audit         the context manager and its results
comparison    two audits: an interrupted and an uninterrupted run, or two ways of cutting batches
"""
