"""Table of rules: (operation, operand position) -> rule for the per-sample gradients of that operand.

`OPERAND_RULES`: operation -> rule for the gradients of its operands, so that a backward pass need not run it.

Uses without a rule, and uses for which the rule returns None, are computed by `generic`: the same values, slower.
"""

from functools import partial

from samplewise.engine.rules import broadcast, convolution, embedding, matrices, recurrent
from samplewise.engine.rules.rule_input import OperandRule as OperandRule
from samplewise.engine.rules.rule_input import Rule as Rule
from samplewise.engine.rules.rule_input import Use as Use

RULES: dict[tuple[str, int], Rule] = {
    ("Mm", 0): Rule(partial(matrices.left_operand, right="mat2"), ("mat2",)),
    ("Mm", 1): Rule(partial(matrices.right_operand, left="self"), ("self",)),
    ("Addmm", 0): Rule(matrices.addmm_bias),
    ("Addmm", 1): Rule(partial(matrices.left_operand, right="mat2"), ("mat2",)),
    ("Addmm", 2): Rule(partial(matrices.right_operand, left="mat1"), ("mat1",)),
    ("Bmm", 0): Rule(matrices.bmm_left, ("mat2",)),
    ("Bmm", 1): Rule(matrices.bmm_right, ("self",)),
    ("GroupedMm", 1): Rule(matrices.grouped_right, ("self", "offs")),
    ("Mv", 1): Rule(matrices.mv_vector, ("self",)),
    ("Trilinear", 1): Rule(matrices.bilinear, ("i1", "i3")),
    ("LinalgSolveEx", 0): Rule(matrices.solve_matrix, ("A", "result")),
    ("Cdist", 0): Rule(matrices.cdist_points, ("x1", "x2", "result")),
    ("Cdist", 1): Rule(matrices.cdist_points, ("x1", "x2", "result")),
    ("EuclideanDist", 0): Rule(matrices.cdist_points, ("x1", "x2", "result")),
    ("EuclideanDist", 1): Rule(matrices.cdist_points, ("x1", "x2", "result")),
    ("Convolution", 1): Rule(convolution.kernel, ("input", "weight"), convolution.kernel_factors),
    ("Convolution", 2): Rule(convolution.bias),
    ("Embedding", 0): Rule(embedding.table, ("indices",)),
    ("EmbeddingBag", 0): Rule(embedding.bag_table, embedding.BAG_READS),
    ("Index", 0): Rule(embedding.indexed_table, ("indices",)),
    ("IndexSelect", 0): Rule(embedding.selected_table, ("index",)),
    ("NativeLayerNorm", 1): Rule(broadcast.layer_norm_scale, ("input", "result1", "result2")),
    ("NativeLayerNorm", 2): Rule(broadcast.addend),
    ("NativeGroupNorm", 1): Rule(broadcast.group_norm_scale, ("input", "result1", "result2")),
    ("NativeGroupNorm", 2): Rule(broadcast.group_norm_shift, ("input", "result1", "result2")),
    ("NativeBatchNorm", 1): Rule(broadcast.batch_norm_scale, ("input", "running_mean", "running_var")),
    ("NativeBatchNorm", 2): Rule(broadcast.batch_norm_shift),
    ("Expand", 0): Rule(broadcast.addend),
    ("Add", 0): Rule(broadcast.addend),
    ("Add", 1): Rule(broadcast.scaled_addend),
    ("Sub", 0): Rule(broadcast.addend),
    ("Sub", 1): Rule(broadcast.subtrahend),
    ("Mul", 0): Rule(broadcast.times_other, ("other",)),
    ("Mul", 1): Rule(broadcast.times_self, ("self",)),
    ("Div", 0): Rule(broadcast.dividend, ("other",)),
    ("MkldnnRnnLayer", 1): Rule(recurrent.input_weights, recurrent.READS),
    ("MkldnnRnnLayer", 2): Rule(recurrent.hidden_weights, recurrent.READS),
    ("MkldnnRnnLayer", 3): Rule(recurrent.biases, recurrent.READS),
    ("MkldnnRnnLayer", 4): Rule(recurrent.biases, recurrent.READS),
    ("PreluKernel", 1): Rule(broadcast.prelu_slope, ("self",)),
}

OPERAND_RULES: dict[str, OperandRule] = {
    "MkldnnRnnLayer": OperandRule(recurrent.operands, recurrent.READS),
}
