"""Scalars that generated kernels read before their loops."""

from __future__ import annotations

from samplewise.step.compiled.inductor import hoist_scalars

KERNEL = """
extern "C"  void  kernel(const double* in_ptr0,
                       const float* in_ptr1,
                       bool* out_ptr0,
                       float* out_ptr1)
{{
    {{
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(32L); x0+=static_cast<int64_t>(16L))
        {{
            {body}
        }}
    }}
}}
"""
STORE = "tmp9.store(out_ptr1 + static_cast<int64_t>(x0));"


def read(pointer: str, index: int = 0) -> str:
    return f"auto tmp0 = {pointer}[static_cast<int64_t>({index}L)];"


def hoisted(*lines: str) -> str:
    return hoist_scalars(KERNEL.format(body="\n            ".join(lines)))


def test_a_scalar_of_another_dtype_is_read_before_the_loop() -> None:
    found = hoisted(read("in_ptr0", 2), STORE)
    assert found.index("const auto in_ptr0_2 = in_ptr0[2];") < found.index("for(")
    assert "auto tmp0 = in_ptr0_2;" in found
    assert read("in_ptr0", 2) not in found


def test_a_flag_of_an_earlier_block_is_read_before_the_loop() -> None:
    found = hoisted(read("out_ptr0"), STORE)
    assert "const auto out_ptr0_0 = out_ptr0[0];" in found


def test_a_scalar_that_is_read_twice_has_one_variable() -> None:
    found = hoisted(read("in_ptr0"), read("in_ptr0"), STORE)
    assert found.count("const auto in_ptr0_0") == 1
    assert found.count("auto tmp0 = in_ptr0_0;") == 2


def test_a_scalar_of_a_stored_dtype_stays_in_the_loop() -> None:
    for lines in [(read("in_ptr1"), STORE), (read("out_ptr0"), "out_ptr0[static_cast<int64_t>(0L)] = tmp1;")]:
        assert hoisted(*lines) == KERNEL.format(body="\n            ".join(lines))


def test_a_block_with_an_unknown_pointer_is_unchanged() -> None:
    lines = (read("in_ptr0"), "tmp9.store(other_ptr7 + x0);")
    assert hoisted(*lines) == KERNEL.format(body="\n            ".join(lines))


def test_elements_that_depend_on_the_loop_stay_in_it() -> None:
    line = "auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];"
    assert hoisted(line, STORE) == KERNEL.format(body=f"{line}\n            {STORE}")
