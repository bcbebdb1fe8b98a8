"""Per-sample gradients from the autograd graph. Uses autograd; independent of the training code.

Data flows in this order:

    losses ─ arguments   validation of arguments; deferred_checks: of values, which are read later on an accelerator
           ─ outputs     of a scalar loss: the part of each sample, from the outputs that the loss was computed from
           ─ graph/      nodes between the losses and the parameters (graph), with the graph structure as a key
                         (structure), the tensors that they saved (saved) and hooks on them (hook_registry)

    Once per graph structure and shapes:
           ─ ownership/  the sample that owns each element of a gradient, as an owner_map, node by node (ownership):
             layouts     from shapes and saved numbers, for known operations,
             local_probe from saved indices, or by calls of the node itself, whose answers are claims
             verify      verification of the result with extra backward passes
             probe       if this does not suffice: backward passes through the whole graph, whose loss weights are
                         powers of two; weighted_passes: with some of them zero, error if a pass is not linear
             cut         boundary below which a gradient mixes samples; independence: error if samples depend on
                         each other there
           ─ plan        rule for each use of a parameter; parameter_side: operations between the use and
                         the parameter. `Planner` (in strategies) caches plans.

    For each graph:
           ─ local_probe verification of the claims that the plan depends on; of Python functions during the pass
           ─ strategies  order of the steps below, in `BackwardStrategy`; one backward pass per sample, in
                         `jacobian_rows`, which the tests compare everything with
           ─ backward    one backward pass from the losses to the cut, in segments if nodes are left out
             hook_checks verification of hooks above the cut, at their nodes; error for hooks on tensors or nodes
                         below the cut, where this pass does not run
           ─ plan        `GradBuilder`: application of the plan to the gradients at each node of the cut
           ─ saved       tensors that the operations saved for backward
           ─ rules/      conversion of saved tensors and output gradient (rule_input) into
             grads/      a representation of per-sample gradients: rows (dense), factors (factored),
             generic     or, for operations without a rule, rows on demand
           ─ quantities  any quantity of these representations (`QuantityEvaluator`), and norms
           ─ projection  random projections
           ─ gradients   `sw.gradients`: these quantities, sums, Gram matrices and rows; inputs: `sw.input_gradients`

`profile` and `slow_paths` say where time goes.
"""
