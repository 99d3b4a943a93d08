"""A few of the bodies that `make fuzz` sends by the thousand; a failure shows its seed."""

from engine.fuzz_bodies import SLOTS, Fuzz

SEED = 20261122
COUNT = 300


def test_the_sidecar_reads_random_bodies_and_paths_as_the_engine_does(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["-np", str(SLOTS), "-c", "4096"])
    fuzz = Fuzz(engine.base, SEED)
    assert list(fuzz.run(COUNT)) == []
    assert fuzz.tally["taken"] > COUNT / 10
    assert fuzz.tally["path found"] > 0
