"""The reader of compiled programs: this machine's, whose work is known by hand, and lines of other machines'."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim.instruments.compiled import Collective, read_compiled


def read(function, *shapes, **options):
    """Reads a function that is compiled for this machine."""
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return read_compiled(jax.jit(function, **options).lower(*specs).compile().as_text(), "cpu")


def test_a_product():
    """Faults: a product whose depth is taken from the wrong axis, and bytes of one operand alone."""
    program = read(lambda a, b: a @ b, (8, 4), (4, 16))
    assert program.flops == {"float32": 2 * 8 * 4 * 16}
    assert program.memory_bytes == 4 * (8 * 4 + 4 * 16 + 8 * 16)
    assert program.num_launches == 1 and not program.open_loops and not program.collectives


def test_a_batch_of_products():
    """Faults: the batch counted twice, or not at all."""
    program = read(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (5, 8, 4), (5, 4, 16))
    assert program.flops == {"float32": 2 * 5 * 8 * 4 * 16}


@pytest.mark.parametrize("padding, places", [("VALID", 6 * 6), ("SAME", (8 * 3 - 2) ** 2 / 9)])
def test_a_convolution(padding, places):
    """Of 8 by 8 places with 3 by 3 taps. Fault: zeros of the padding that count as work."""

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    program = read(convolved, (2, 8, 8, 5), (3, 3, 5, 7))
    assert sum(program.flops.values()) == pytest.approx(2 * 2 * 5 * 7 * 9 * places)


def test_a_loop_counts_its_turns():
    """Faults: a body that counts once; a loop of unknown length that is counted as if it were known."""

    def known(x):
        return jax.lax.fori_loop(0, 10, lambda i, x: x @ x, x)

    def unknown(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    assert read(known, (16, 16)).flops == {"float32": 10 * 2 * 16**3}
    program = read(unknown, (16, 16))
    assert program.flops == {"float32": 2 * 16**3}
    assert len(program.open_loops) == 1


def test_a_part_costs_its_own_bytes():
    """Faults: a slice that is taken for a pass over all rows, and rows that are written in place taken for a copy."""
    rows, row_bytes = 1000, 4 * 64

    def taken(x, i):
        return jax.lax.dynamic_slice(x, (i.astype(int)[0], 0), (1, 64)) * 2

    def put(x, row):
        return jax.lax.dynamic_update_slice(x, row, (7, 0))

    assert read(taken, (rows, 64), (1,)).memory_bytes < 4 * row_bytes

    def scattered(x, row):
        return x.at[jnp.array([5])].set(row)

    assert read(put, (rows, 64), (1, 64), donate_argnums=0).memory_bytes < 4 * row_bytes
    assert read(scattered, (rows, 64), (1, 64), donate_argnums=0).memory_bytes < 6 * row_bytes


def test_host_calls_count():
    """Fault: a round that waits for Python and looks as fast as one that does not."""

    def calls(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    assert read(calls, (3,)).num_host_calls == 1


TPU = """HloModule step, is_scheduled=true

%fused (a.1: f32[10,20], b.1: f32[10,20]) -> f32[10,20] {
  %a.1 = f32[10,20]{1,0:T(8,128)} parameter(0)
  %b.1 = f32[10,20]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %sum.1 = f32[10,20]{1,0:T(8,128)} add(%a.1, %b.1)
}

ENTRY %main (a: f32[10,20], b: f32[10,20]) -> f32[10,20] {
  %a = f32[10,20]{1,0:T(8,128)} parameter(0)
  %b = f32[10,20]{1,0:T(8,128)} parameter(1)
  %copy-start = (f32[10,20]{1,0:T(8,128)S(1)}, f32[10,20]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%b)
  %copy-done = f32[10,20]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %sum = f32[10,20]{1,0:T(8,128)} fusion(%a, %copy-done), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/add"}
  ROOT %all-reduce = f32[10,20]{1,0:T(8,128)S(1)} all-reduce(%sum), replica_groups=[1,4]<=[4], to_apply=%region
}
"""


def test_tiles_of_a_tpu():
    """10 by 20 numbers fill 16 by 128. Faults: plain sizes, which a TPU pads sixfold; its fast memory taken for its
    large one; an exchange whose result stands in the fast memory counted as nothing."""
    tile_bytes = 4 * 16 * 128
    program = read_compiled(TPU, "tpu")
    copy, fusion = program.kernels
    assert copy.memory_bytes == tile_bytes
    assert fusion.memory_bytes == 2 * tile_bytes
    assert fusion.source == "jit(step)/add"
    assert program.collectives == (Collective("all-reduce", 1, 4 * 10 * 20),)


UPDATE = """%fused (x.1: f32[1000,64], row.1: f32[1,64], i.1: s32[]) -> f32[1000,64] {
  %x.1 = f32[1000,64]{1,0} parameter(0)
  %row.1 = f32[1,64]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new.1 = f32[1000,64]{1,0} dynamic-update-slice(%x.1, %row.1, %i.1, %zero)
}

ENTRY %main (x: f32[1000,64], row: f32[1,64], i: s32[]) -> f32[1000,64] {
  %x = f32[1000,64]{1,0} parameter(0)
  %row = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[1000,64]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%fused
}
"""


def test_an_update_in_place_inside_of_a_fusion():
    """Fault: rows of client memory that are written in place taken for a copy of the whole memory."""
    assert read_compiled(UPDATE, "gpu").memory_bytes == 2 * 4 * 64 + 4


GEMM = """ENTRY %main (a: f32[8,4], b: f32[4,16]) -> f32[8,16] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,16]{1,0} parameter(1)
  ROOT %c = f32[8,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},\
"precision_config":{"operand_precision":["PRECISION","PRECISION"]}}}
}
"""


@pytest.mark.parametrize("asked, precision", [("HIGHEST", "float32"), ("DEFAULT", "tensorfloat32")])
def test_a_library_call_of_a_gpu(asked, precision):
    """Fault: a product that goes to NVIDIA's library and is not seen, or at the speed of another precision."""
    assert read_compiled(GEMM.replace("PRECISION", asked), "gpu").flops == {precision: 2 * 8 * 4 * 16}


def test_a_branch_counts_with_all_that_it_does():
    """Fault: exchanges and calls of a branch that is not counted."""
    text = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%exchange (x: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %sum.1 = f32[100]{0} all-reduce(%x), to_apply=%add
  ROOT %copy = f32[100]{0} copy(%sum.1)
}
%nothing (y: f32[100]) -> f32[100] {
  ROOT %y = f32[100]{0} parameter(0)
}
ENTRY %main (i: s32[], z: f32[100]) -> f32[100] {
  %i = s32[] parameter(0)
  %z = f32[100]{0} parameter(1)
  ROOT %out = f32[100]{0} conditional(%i, %z, %z), branch_computations={BRANCHES}
}
"""
    both = read_compiled(text.replace("BRANCHES", "%exchange, %nothing"), "gpu")
    assert not both.collectives and not both.kernels
    one = read_compiled(text.replace("BRANCHES", "%exchange, %exchange"), "gpu")
    assert one.collectives == (Collective("all-reduce", 1, 400.0),) and one.num_launches == 1


@pytest.mark.parametrize("marks", ["", ", u32[]{:S(2)}, u32[]{:S(2)}"])
def test_an_array_that_is_passed_on(marks):
    """A TPU's exchange that has begun names two marks too. Fault: their bytes in place of the array's."""
    text = f"""HloModule m
ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %start = (f32[1000]{{0}}, f32[1000]{{0}}{marks}) collective-permute-start(%x), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %done = f32[1000]{{0}} collective-permute-done(%start)
}}
"""
    assert read_compiled(text, "tpu").collectives == (Collective("collective-permute", 1, 4000.0),)


def test_no_program():
    """Fault: an empty forecast of a text that holds nothing."""
    with pytest.raises(ValueError, match="text: expected a compiled program"):
        read_compiled("no program", "cpu")
