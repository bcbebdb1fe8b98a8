"""Per-sample gradients from the autograd graph. Uses autograd; independent of the training code.

Data flows in this order:

    losses ─ checks      validation of arguments and results
           ─ graph       nodes between the losses and the parameters, with the graph structure as a key

    Once per graph structure and shapes:
           ─ ownership   the sample that owns each element of a gradient, node by node:
             layouts     from shapes and saved numbers, for known operations,
             indexing    from saved indices,
             local_probe or by calls of the node itself, whose answers are claims
             verify      verification of the result with extra backward passes
             probe       if this does not suffice: backward passes through the whole graph, whose loss weights are
                         powers of two
           ─ cut         boundary below which a gradient mixes samples; independence: error if samples depend on
                         each other there
           ─ plan        rule for each use of a parameter; parameter_side: operations between the use and
                         the parameter. Plans are cached.

    For each graph:
           ─ local_probe verification of the claims that the plan depends on; of Python functions during the pass
           ─ strategies  order of the steps below
           ─ backward    one backward pass from the losses to the cut
             hook_checks verification of hooks above the cut, at their nodes;
             hooks       error for hooks on tensors or nodes below the cut, where this pass does not run;
                         registered_hooks: where the graph has hooks
           ─ saved       tensors that the operations saved for backward
           ─ rules       conversion of saved tensors and output gradient into
             grads       a representation of per-sample gradients: rows (dense), factors (factored),
             generic     or, for operations without a rule, rows on demand
           ─ gradients   quantities computed from these representations: norms, sums, Gram matrices, rows

`reference` computes the same gradients with one backward pass per sample; the tests compare against it.
"""
