"""What the notebooks quote of a processor is what was recorded there: `tools/record.py cpu`."""

import numpy as np
from claims import claims

from dlojz import runs
from dlojz.runs import log
from dlojz.runs.stats import summary


def read(name):
    return log.read(runs.recorded(f"cpu/{name}"))


def speed(name):
    return summary(runs.recorded(f"cpu/{name}")).images_per_s


@claims("02b_formats")
def test_16_bits_by_instructions_as_in_notebook_02b():
    gains = [
        speed(f"02-cpu-{isa}-bf16") / speed(f"02-cpu-{isa}-fp32")
        for isa in ("avx512-bf16", "avx512", "avx2")
    ]
    yield f"| AVX512_BF16 | {gains[0]:.1f} times as fast |"
    yield f"| AVX-512 without it | takes {1 / gains[1]:.1f} times as long |"
    yield f"| AVX2 only | takes {1 / gains[2]:.0f} times as long"


@claims("03_channels_last")
def test_layouts_of_small_and_large_images_as_in_notebook_03():
    more = []
    for pixels in ("064", "128"):
        ms = {m.what: m.value for m in read(f"03-cpu-layouts-{pixels}").measures}
        more.append(100 * (ms["neither"] / ms["both"] - 1))
    yield "*both* was {:.0f} % faster than *neither* at 64 pixels, and {:.0f} % at".format(*more)


@claims("04b_roofline")
def test_means_of_segments_as_in_notebook_04b():
    pairs = np.array(read("04-cpu-segments").cases["speed"]["forward"])
    gain = np.median(pairs[:, 0] / pairs[:, 1])
    cases = read("04-cpu-means").cases
    ms, both = (
        {name: np.median(case[what]) for name, case in cases.items()}
        for what in ("ms", "and_backward_ms")
    )
    two, one, sort = "two scatter_add_", "scatter_reduce", "a sort and segment_reduce"
    yield f"{gain:.1f} times as fast in the median of twelve pairs"
    yield f"it was {ms[two] / ms[one]:.1f} times as fast as two `scatter_add_`"
    yield f"it took **{both[one] / both[two]:.1f} times as long**"
    yield f"took {ms[sort] / ms[two]:.1f} times as long as two `scatter_add_`"
    assert len(pairs) == 12


@claims("05_dataloader")
def test_the_first_batch_of_later_epochs_as_in_notebook_05():
    for kept, words in (("", "{:.0f} to {:.0f} ms with"), ("no-", "{:.0f} to {:.0f} ms without")):
        waits = np.asarray(read(f"05-cpu-{kept}persistent").steps.host_ms["data"])
        later = waits[12::12]
        assert len(later) == 3
        yield words.format(later.min(), later.max())
