from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.lint_kernels.assembly import read_amdgcn, read_sass

# What cuobjdump prints, shortened: a loop from 0x20 to 0x70, one register kept in memory, one store of 16 bits.
SASS = """
Resource usage:
 Function _kernel:
  REG:40 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:584

	code for sm_90
		Function : _kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.64 R2, desc[UR4][R2.64] ;        /* 0x0000000402027981 */
        /*0020*/              @P0 LDG.E.128 R4, desc[UR4][R2.64] ;        /* 0x0000000402047981 */
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64], P0 ;
        /*0040*/                   STL [R1], R4 ;                         /* 0x0000000402047981 */
        /*0050*/              @!P1 BRA 0x70 ;                             /* 0x0000000402047981 */
        /*0060*/                   STG.E.U16 desc[UR4][R2.64], R4 ;       /* 0x0000000402047981 */
        /*0070*/             @!UP0 BRA 0x20 ;                             /* 0x0000000402047981 */
        /*0080*/                   LDL R4, [R1] ;                         /* 0x0000000402047981 */
        /*0090*/                   STG.E desc[UR4][R2.64], R4 ;           /* 0x0000000402047981 */
        /*00a0*/                   EXIT ;                                 /* 0x000000000000794d */
        /*00b0*/                   BRA 0xb0;                              /* 0xfffffffc00fc7947 */
        /*00c0*/                   NOP;                                   /* 0x0000000000007918 */
"""
AMDGCN = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
_kernel:                                ; @_kernel
	s_load_dwordx2 s[0:1], s[0:1], 0x0
	global_load_dwordx2 v[0:1], v2, s[0:1]
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	buffer_load_dwordx4 v[4:7], v3, s[4:7], 0 offen
	v_add_f32_e32 v4, v4, v5
	s_cbranch_scc1 .LBB0_1
	buffer_store_short v4, v3, s[4:7], 0 offen
	ds_write_b32 v4, v5
	s_cbranch_vccz .LBB0_2
.LBB0_2:
	s_endpgm
    .vgpr_count:     98
    .vgpr_spill_count: 3
"""


def test_sass() -> None:
    code = read_sass(SASS)
    assert (code.registers, code.spills) == (40, 2)
    assert sum(code.looped.values()) == 6  # from 0x20 to 0x70
    assert sum(code.once.values()) == 5  # without the branch to itself, and what fills up the end
    assert code.instructions(10) == 65
    assert code.accesses() == {("load", 64): 1, ("load", 128): 2, ("store", 16): 1, ("store", 32): 1}
    assert code.narrow() == 1


def test_amdgcn() -> None:
    code = read_amdgcn(AMDGCN)
    assert (code.registers, code.spills) == (98, 3)
    assert code.looped == {"buffer_load_dwordx4": 1, "v_add_f32_e32": 1}
    assert code.once == {"global_load_dwordx2": 1, "buffer_store_short": 1, "ds_write_b32": 1}
    assert code.instructions(2.5) == 8
    assert code.accesses() == {("load", 64): 1, ("load", 128): 1, ("store", 16): 1}
    assert code.narrow() == 0
    assert replace(code, looped=Counter({"v_mov_b32": 9})).narrow() == 2


def test_a_text_without_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cuobjdump printed no function: 'Fatal'$"):
        read_sass("Fatal")
    with pytest.raises(ValueError, match=r"^no function in the assembly: 'nothing'$"):
        read_amdgcn("nothing")
