"""Per-sample gradients from the autograd graph. Knows autograd, nothing of training.

Data flows one way:

    losses ─ graph       the nodes between losses and parameters
           ─ layouts     which sample owns each row of a gradient: proven from shapes, where operations allow it,
             probe       or asked of autograd, by powers of two
             verify      checks each proof with extra backward passes
           ─ cut         where gradients stop belonging to single samples; interaction: whether that is harmless
           ─ plan        which rule serves each use of a parameter; sides: the way from there to the parameter
           ─ passes      one backward pass to the cut
             hooks       refuses hooks that act where the pass has ended
           ─ rules       an operation's saved tensors and the arriving gradient become
             forms       what is kept of a parameter: rows, or factors (outer), or a promise of rows (generic)
           ─ gradients   every quantity that can be asked of them

`reference` is the same by a plain loop, which everything is tested against.
"""
