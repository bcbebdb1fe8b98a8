"""The example of docs/distributed.md with a Hugging Face model, on ranks."""

from pathlib import Path

import pytest
import torch
from spread_models import flat

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def example(run, updates):
    """`train` of the example, which continues the run."""
    code = PAGE.read_text().split("## FSDP")[1].split("```python")[1].split("if dist.is_torchelastic_launched")[0]
    namespace = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return flat(namespace["train"](run, updates))


@pytest.mark.slow
def test_a_hugging_face_model_continues_with_another_number_of_ranks(two, three, tmp_path):
    expected = example(tmp_path / "alone", 3)
    two.run(example, tmp_path / "run", 2)
    for found in three.run(example, tmp_path / "run", 3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
