"""`sw.audit`: the weight of every sample and target in the updates of a training loop, and faults of the loop.

observer      hooks on modules and optimizers
calls         calls of models, and hooks on their outputs
updates       backward passes, and the updates that their gradients are applied in
accumulation  backward passes that are in `.grad`
reader        reads the weights of passes, small ones together
weights       weights of targets, from outputs and the gradient of the loss with respect to them
records       what is recorded: calls, passes, rows, steps
totals        weights of an update
findings      a fault, what faults are found from, and what could not be seen
loop_rules    rules about windows, gradients, modes, schedules and data
rules         rules about weights of targets; all rules, and their codes
audit         `sw.audit`, the context manager and its results
comparison    two audits: an interrupted and an uninterrupted run, or two ways of cutting batches
script        audit of a training script
"""
