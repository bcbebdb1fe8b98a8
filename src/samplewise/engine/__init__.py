"""Per-sample gradients from the autograd graph. Uses autograd; independent of the training code.

Data flows in this order:

    losses ─ graph       nodes between the losses and the parameters
           ─ layouts     the sample that owns each row of a gradient: proven from shapes for known operations,
             probe       or measured with backward passes whose loss weights are powers of two
             verify      verification of each proof with extra backward passes
           ─ cut         boundary below which a gradient mixes samples; independence: error if samples depend on
                         each other there
           ─ plan        rule for each use of a parameter; parameter_side: operations between the use and
                         the parameter
           ─ backward    one backward pass from the losses to the cut
             hooks       error for hooks on tensors or nodes below the cut, where this pass does not run
           ─ rules       conversion of an operation's saved tensors and output gradient into
             grads       a representation of per-sample gradients: rows, factors (factored), rows on demand (generic)
           ─ gradients   quantities computed from these representations: norms, sums, Gram matrices, rows

`reference` computes the same gradients with one backward pass per sample; the tests compare against it.
"""
