"""Stored segments of earlier releases: a disk tier opens them, and their pages hit."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import numpy as np
import pytest

from kvloom.core.prefix.block_hash import hash_chain, root_hash, token_bytes
from kvloom.tiers import DiskConfig, DiskTier, Form, Objects, Ranges

SEGMENTS = {
    "none": (
        "c-r$0^9go!XJlY9JssV~CI9K%iFuj}B(3=vpx~@>(x$M$mWd3bU=)mkQ7{Td!6+C7qhJ(_f>AIEM!_f;vcNmc$Bhw4"
        "WAy(8Ao5H=d;r8yfU6Gxspqzozg=sYl(cGo!I{G9$CE&Ei*?K{b;&pXQVBbp-(p&1zydP>2snSuz8EDCDS(T1`}a{J"
        "`S)!fnECIYE_vYf$6;!YOxDrMzlv^AYW~}4Z&$8yIT}}S!q(en((PxXF+U1M!6+C7qhJ(_f>AIEM!_f;1*2d@0Y)Zf"
        "7FITP4o)s^9$r3v0YM>Q5m7O52}vnw8Cf}b1w|!g6;(BL4NWa=9bG+r14AQY6H_yD3rj0&8(TYj2S+Do7gslT4^J;|"
        "A74NJfWV;OkkGL3h{&kunAo`Zgv6xel+?8JjLfX;oZP(pg2JNWlG3vBipr|$n%cVhhQ_Amme#iRj?S*`p5DIx2@@wx"
        "o-%dX^cgc}&7L!N-uwj%7cE}0blLJ1D_5;vvv%G34I4LY-m-Pu_8mKS?cTF@-~Iy!4;?;o^w{weCr_O|bN1Z%3l}e4"
        "zH;^2^&2;D-M(}8-u(v;A3c8Z^x5+lFJHZW^Y-2Q4<A2${_^$P_a8rh{r>a!-~UnnkNSVq|D*mN_5Y~<N2LEp!6+C7"
        "qhJ(_f>AKq{~vAtjrxDo|D*mN_5Y~<NBuwA{~raTU=)mkQ7{Td!LS1W0M}Q{"
    ),
    "lz4": (
        "c-r$0^9go!XJoLN|FMW;`U;y5fsTK2zl+o}K!JGtlrO<wmWnWpf>AIEM!_f;1*2dTjDk@x3P!;w7zLwX$O7*$A2&uI"
        "jnV%XfXFie@dFS;0j@rPk%5tc+fx2^tz}Zus`&+H3acMa0?94bF}u_y-~3A@>~MaIX^{a7%m5(Z{5AVxlt82aE}9$Y"
        "2xPpc;X`e0<YX_Heea(xdEoWOVQP*{*3rwqif&QczTF@07&qQsP~T9!)8e1uhAE>dV-$>nQ7{Td!6+C7qhJ(_f>AIE"
        "M!|3b|35M?GBLBTvaxe;a&hzU^6?7@3JHsdiit}|N=eJe%E>DzDk-a|s;O&eYH91}>ggL88X23InweWzT3OrJ+Sxle"
        "Iyt+zy19FJdU^Z!`uPV01_g(NhJ{B&Mn%WO#>FQjCMBn&rln_OW@YE(=H(X@78RG2mX%jjR#n&3*3~yOHZ`}jwzYS3"
        "c6Imk_VrJgIBD{fsne#<m^o|qoVoMnFIc!}@sg#>maka3YW146>(+1BxM}m2t=qQm*tu)>p1u3_A2@jE@R6g(j-NPr"
        ">hzhj=gwcac<J($tJkjIxOwaLoxAt$KX~})@sp>|p1*kc>h+tq@7{m-`04YPuiw7^`1$MipTGb9Gcdjg05e8|Vl*g5"
        "g91-bjFy(8U=)mkQ7{Td!6+C7qhJ(__WwtFdZR%x8Wf}b|4}dsM!_f;1*2dTjDk@x3P!=;1^^b~pj!"
    ),
}
"""`000000000000.seg` of two pages, written with each compression; version 1."""


@pytest.mark.parametrize("compression", list(SEGMENTS))
def test_a_segment_of_an_earlier_release_is_read(tmp_path: Path, compression: str) -> None:
    """Hashes, keys, heads, frames and checksums are all part of it. A change of any needs a new version."""
    (tmp_path / "000000000000.seg").write_bytes(zlib.decompress(base64.b85decode(SEGMENTS[compression])))
    hashes = hash_chain(root_hash("a-model"), token_bytes(np.arange(32)))
    objects = Objects(hashes, 0, Form("bf16", "LKTHD", 2048, 512))
    pages = np.zeros(2 * 2048, np.uint8)
    tier = DiskTier(DiskConfig(tmp_path, 64 << 20))
    assert tier.lookup(objects).all()
    transfer = tier.read(objects, Ranges(pages, [0, 2048]))
    assert transfer.wait(20)
    assert transfer.ok.all(), transfer
    assert np.array_equal(pages, np.arange(2 * 2048).astype(np.uint8))
    tier.close()
