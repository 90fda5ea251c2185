"""Caches that a graph writes to: in place, and all else as a functional graph has it."""

from __future__ import annotations

import textwrap

import pytest
import torch
from common import compiled, last, needs_torch

from composer.graphs import sharing
from composer.lowering import in_place
from composer.lowering.loaded import BoundRegion

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]

ENGINES = ("onnxrt", "openvino")


def index_copy(cache, at, new):
    cache.index_copy_(2, at, new.sin())
    return cache * 2


def by_index(cache, at, new):
    cache[:, :, at] = new.sin()
    return cache.relu()


def by_slice(cache, at, new):
    cache[:, :, 3:4] = new.sin()
    return cache.relu()


def by_views_of_views(cache, at, new):
    cache[0, 1:, 7:8] = new[0, :1].sin()
    return cache.relu()


def by_select(cache, at, new):
    cache[:, :, 7] = new[:, :, 0].sin()
    return cache.relu()


def scatter(cache, at, new):
    cache.scatter_(2, at.view(1, 1, 1, 1).expand(1, 2, 1, 64), new.sin())
    return cache.relu()


def scatter_a_number(cache, at, new):
    cache.scatter_(2, at.view(1, 1, 1, 1).expand(1, 2, 1, 64), 3.0)
    return cache.relu() + new


def twice(cache, at, new):
    cache[:, :, 7] = new[:, :, 0].sin()
    cache[:, :, at] = new * 2
    return cache.relu()


def broadcast_and_cast(cache, at, new):
    cache[:, :, 3:6] = (new.sin() * 2).to(torch.float16)
    return cache.relu()


WRITTEN = (
    *(index_copy, by_index, by_slice, by_views_of_views, by_select, scatter, scatter_a_number),
    *(twice, broadcast_and_cast),
)


def reads_before(cache, at, new):
    total = cache.sum()
    cache[:, :, at] = new.sin()
    return cache.relu() + total


def reads_between(cache, at, new):
    cache[:, :, 7] = new[:, :, 0].sin()
    total = cache.sum()
    cache[:, :, at] = new
    return cache.relu() + total


def writes_what_it_read(cache, at, new):
    cache[:, :, at] = cache[:, :, :1] + new
    return cache.relu()


def writes_a_part_to_another(cache, at, new):
    cache[:, :, 1:] = cache[:, :, :-1].clone()
    return cache.relu() + new


def adds(cache, at, new):
    torch.ops.aten.index_put_(cache, [None, None, at], new.sin(), True)
    return cache.relu()


def where_it_is_large(cache, at, new):
    cache[cache > 1] = 0.5
    return cache.relu() + new


def returns_it(cache, at, new):
    cache[:, :, at] = new.sin()
    return cache, cache.reshape(-1), new.relu()


def returns_a_copy(cache, at, new):
    found = cache.index_copy(2, at, new.sin())
    cache.copy_(found)
    return found, found[0]


def writes_to_its_own(cache, at, new):
    mine = cache.clone()
    mine[:, :, at] = new.sin()
    return mine.relu(), mine


NOT_WRITTEN = (
    *(reads_before, reads_between, writes_what_it_read, writes_a_part_to_another, adds),
    *(where_it_is_large, returns_it, writes_to_its_own),
    pytest.param(
        returns_a_copy,
        marks=needs_torch("2.13", "the exporter loses a copy that is returned as it is"),
    ),
)

LAYOUTS = {
    "contiguous": lambda: torch.randn(1, 2, 512, 64),
    "transposed": lambda: torch.randn(1, 512, 2, 64).transpose(1, 2),
    "with gaps": lambda: torch.randn(1, 2, 512, 128)[..., ::2],
}


def memories(results, cache) -> list[bool]:
    """Of each result, whether it is memory of the cache."""
    leaves = torch.utils._pytree.tree_leaves(results)
    storage = cache.untyped_storage().data_ptr()
    return [each.untyped_storage().data_ptr() == storage for each in leaves]


def is_told() -> bool:
    """Whether the record says of a call that it writes in place."""
    engine = last().attempts[0].engine
    by_torch = any(f"({in_place.WHY})" in line for line in engine.get("left_to_torch", ()))
    return by_torch or "written_in_place" in engine


def same_as_eager(function, make, engine: str) -> None:
    """Three steps, each with the cache that the one before left."""
    mine = make()
    eagers = torch.empty_strided(mine.shape, mine.stride()).copy_(mine)
    run = compiled(function, engine, min_coverage=0.0)
    for at in (5, 9, 511):
        given = torch.tensor([at]), torch.randn(1, 2, 1, 64)
        found, expected = run(mine, *given), function(eagers, *given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(mine, eagers)
        assert memories(found, mine) == memories(expected, eagers)
    assert (last().chosen, last().runtime.fallbacks) == (engine, 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", WRITTEN)
def test_a_part_of_an_input_is_written_in_place(function, layout, engine) -> None:
    """However the program says it; and it is no work that the engine was refused."""
    same_as_eager(function, LAYOUTS[layout], engine)
    if (function, layout) == (index_copy, "transposed"):
        return  # torch writes it out with a copy that is contiguous
    assert is_told()
    if function is not broadcast_and_cast:
        assert last().attempts[0].coverage == 1.0


@pytest.mark.parametrize("function", [by_index, index_copy])
def test_onnx_runtime_puts_rows_itself(function) -> None:
    """The graph is not cut for that."""
    same_as_eager(function, LAYOUTS["contiguous"], "onnxrt")
    engine = last().attempts[0].engine
    assert (engine["written_in_place"], engine.get("left_to_torch")) == (1, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_written_but_the_rows(run_python, engine) -> None:
    """All other pages of the cache are read-only memory: a copy of it would end the process.

    ONNX Runtime's ``ScatterND`` skips it where its result is to lie where its input does.
    """
    script = f"""
        import ctypes, mmap
        import torch
        import composer

        def step(cache, at, new):
            cache[:, :, at] = new.sin()
            return cache.relu()

        size, page = 4 * 2 * 512 * 64, mmap.PAGESIZE
        memory = mmap.mmap(-1, size)
        cache = torch.frombuffer(memory, dtype=torch.float32).view(1, 2, 512, 64)
        options = {{"chain": ["{engine}"], "min_coverage": 0.0}}
        run = torch.compile(step, backend="composer", options=options)
        given = torch.tensor([100]), torch.randn(1, 2, 1, 64)
        with torch.no_grad():
            run(torch.zeros(1, 2, 512, 64), *given)
            written = {{(256 * at) // page for at in (100, 612)}}
            for each in {{*range(size // page)}} - written:
                place = ctypes.c_void_p(cache.data_ptr() + each * page)
                assert ctypes.CDLL(None).mprotect(place, page, mmap.PROT_READ) == 0
            run(cache, *given)
        assert torch.allclose(cache[:, :, 100:101], given[1].sin())
        assert composer.reports()[-1].runtime.fallbacks == 0
        print(composer.reports()[-1].chosen, flush=True)
        cache.zero_()
    """
    ended = run_python(textwrap.dedent(script))
    assert (ended.stdout, ended.returncode < 0) == (f"{engine}\n", True), ended.stderr


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("places", [[2], [0, -1, 3], []])
def test_rows_are_put_along_any_dimension(dim, places) -> None:
    """By places from either end, one number or as many as there are."""
    at = torch.tensor(places, dtype=torch.int64)
    x = torch.randn(4, 5, 6, 17)

    def put(x, new):
        index = (*[slice(None)] * dim, at)
        found = x.clone()
        found[index] = new
        return found.relu()

    sizes = [*x.shape]
    sizes[dim] = len(places)
    for new in (torch.randn(sizes), torch.tensor(0.5)):
        run = compiled(put, "onnxrt")
        torch.testing.assert_close(run(x, new), put(x, new))
        assert last().chosen == "onnxrt"
        assert last().attempts[0].coverage == 1.0 or not places  # what is empty is torch's


@pytest.mark.parametrize("engine", ENGINES)
def test_short_rows_are_put_at_their_places(engine) -> None:
    """Too short to be written one by one: the cache is what it is in eager all the same."""

    def step(cache, at, new):
        cache[at] = new.sin()
        return cache.relu()

    at, new, cache = torch.tensor([5, 0]), torch.randn(2, 8), torch.randn(512, 8)
    mine = cache.clone()
    found = compiled(step, engine, min_coverage=0.0)(mine, at, new)
    torch.testing.assert_close((found, mine), (step(cache, at, new), cache))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_place_that_is_not_there_is_eagers_error(engine) -> None:
    """And nothing is written, to no cache behind it either."""

    def step(keys, values, at, new):
        keys[:, :, at] = new
        values[:, :, at] = new.sin()
        return keys.cos() + values

    caches = [torch.randn(1, 2, 512, 64) for _ in range(2)]
    before, new = [each.clone() for each in caches], torch.randn(1, 2, 1, 64)
    run = compiled(step, engine, min_coverage=0.0)
    run(*(each.clone() for each in caches), torch.tensor([3]), new)
    assert is_told()
    with pytest.raises(IndexError):
        run(*caches, torch.tensor([512]), new)
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", NOT_WRITTEN)
def test_what_else_reads_the_input_or_is_returned_is_not(function, layout, engine) -> None:
    """It would see what was written, or share its memory."""
    same_as_eager(function, LAYOUTS[layout], engine)
    assert not is_told() or (function, layout) == (returns_it, "transposed")  # two copies there


@pytest.mark.parametrize("engine", ENGINES)
def test_what_raises_before_the_write_leaves_the_input_alone(engine) -> None:
    """Eager looks up the place, and fails, before it writes."""

    def step(cache, at, new, table, place):
        looked_up = table[place]
        cache[:, :, at] = new.sin()
        return cache.cos() + looked_up

    run = compiled(step, engine, min_coverage=0.0)
    at, new, table = torch.tensor([3]), torch.randn(1, 2, 1, 64), torch.randn(5)
    run(torch.randn(1, 2, 512, 64), at, new, table, torch.tensor([3]))
    cache = torch.randn(1, 2, 512, 64)
    before, version = cache.clone(), cache._version
    with pytest.raises(IndexError):
        run(cache, at, new, table, torch.tensor([7]))
    assert (torch.equal(cache, before), cache._version) == (True, version)


@needs_torch("2.12", "the assertion is lost before a backend sees the graph")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_assertion_before_the_write_leaves_the_input_alone(engine) -> None:
    """It reads nothing that the write needs."""

    def step(cache, at, new, flag):
        torch._check((flag > 0).all().item())
        cache[:, :, at] = new.sin()
        return cache.relu()

    at, new, flag = torch.tensor([3]), torch.randn(1, 2, 1, 64), torch.ones(3)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compiled(step, engine, min_coverage=0.0)
        run(torch.randn(1, 2, 512, 64), at, new, flag)
        assert is_told()
        cache = torch.randn(1, 2, 512, 64)
        before = cache.clone()
        with pytest.raises(RuntimeError):
            run(cache, at, new, -flag)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_read_before_the_write_is_what_was_there(engine) -> None:
    """Also through another input that is the same memory at a later call."""

    def step(cache, other, at, new):
        read = other.sin().sum(-1)
        cache[:, :, at] = new.sin()
        return read, cache.cos()

    run = compiled(step, engine, min_coverage=0.0)
    at, new = torch.tensor([300]), torch.randn(1, 2, 1, 64)
    run(torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64), at, new)
    mine = torch.randn(1, 2, 512, 64)
    eagers = mine.clone()
    found, expected = run(mine, mine.detach(), at, new), step(eagers, eagers.detach(), at, new)
    torch.testing.assert_close(found, expected)
    assert is_told()


def zeta(cache, other, at, new):
    read = torch.special.zeta(other, new.abs().sum() + 1.5)  # torch's, behind the region
    cache[:, :, at] = new.sin()
    return read, cache.cos()


def sine(cache, other, at, new):
    read = other.sin()
    cache[:, :, at] = new.sin()
    return read, cache.cos()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("alias", [torch.Tensor.detach, torch.from_dlpack])
@pytest.mark.parametrize("function", [zeta, sine])
def test_an_input_that_becomes_the_same_memory(function, alias, engine) -> None:
    """Whoever reads it, and however it came to be so."""
    run = compiled(function, engine, min_coverage=0.0)
    at, new = torch.tensor([300]), torch.randn(1, 2, 1, 64)
    run(torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64), at, new)
    mine = torch.randn(1, 2, 512, 64)
    eagers = mine.clone()
    found, expected = run(mine, alias(mine), at, new), function(eagers, eagers, at, new)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(mine, eagers)
    assert (last().chosen, is_told()) == (engine, True)


def test_memory_is_shared_where_elements_are() -> None:
    """Parts of one storage may lie side by side."""
    big = torch.zeros(4, 6)
    tensors = [big[0], big[1], big[:, 2], big[2:, 3:], big[3, 5:], torch.zeros(3), big[:0]]
    assert sharing.overlapping(dict(enumerate(tensors))) == {0, 1, 2, 3, 4}
    apart = [big[0], big[1], big[2:, :3].t(), torch.zeros(2)]
    assert sharing.overlapping(dict(enumerate(apart))) == set()
    assert sharing.overlapping({7: apart[0], 9: apart[0].detach()}) == {7, 9}


@torch.library.custom_op("composer_tests::in_place_picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    """Takes no negative number."""
    if bool((x < 0).any()):
        raise ValueError("negative")
    return x.clone()


@picky.register_fake
def _(x):
    return torch.empty_like(x)


def custom(x):
    return picky(x)


def multinomial(x):
    return x.multinomial(2).float()


def divided(x):
    return (torch.full_like(x, 7).to(torch.int8) // (x > 0).to(torch.int8)).float()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("may_raise", [custom, multinomial, divided])
def test_whatever_raises_before_the_write_leaves_the_input_alone(may_raise, engine) -> None:
    """An operator of the program's, numbers that are drawn, a division by zero."""

    def step(cache, at, new, x):
        read = may_raise(x * new.abs().sum().sign())  # an engine's region comes before it
        cache[:, :, at] = new.sin()
        return cache.cos(), read

    run = compiled(step, engine, min_coverage=0.0)
    at, new = torch.tensor([3]), torch.randn(1, 2, 1, 64)
    run(torch.randn(1, 2, 512, 64), at, new, torch.ones(5))
    cache = torch.randn(1, 2, 512, 64)
    before, version = cache.clone(), cache._version
    with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)):
        run(cache, at, new, torch.tensor([1.0, -1, 1, 1, 1]))
    assert (torch.equal(cache, before), cache._version) == (True, version)


def test_a_graph_that_does_nothing_but_write_is_the_engines() -> None:
    """Torch's part would be all of it, else."""

    def put(cache, at, new):
        cache[:, :, at] = new

    mine = torch.randn(1, 2, 512, 64)
    eagers, given = mine.clone(), (torch.tensor([7]), torch.randn(1, 2, 1, 64))
    compiled(put, "onnxrt")(mine, *given)
    put(eagers, *given)
    assert torch.equal(mine, eagers)
    assert (last().chosen, is_told()) == ("onnxrt", True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_whose_length_nobody_knows(engine) -> None:
    """It counts as large."""
    mine = torch.randn(1, 2, 512, 64)
    torch._dynamo.decorators.mark_unbacked(mine, 2)
    eagers, given = mine.clone(), (torch.tensor([7]), torch.randn(1, 2, 1, 64))
    found = compiled(by_index, engine, min_coverage=0.0)(mine, *given)
    torch.testing.assert_close(found, by_index(eagers, *given))
    torch.testing.assert_close(mine, eagers)
    assert (last().chosen, is_told()) == (engine, True)


@pytest.mark.parametrize(
    ("engine", "function", "told"),
    [
        ("onnxrt", by_index, True),
        ("onnxrt", by_slice, False),
        ("openvino", by_slice, False),
    ],
)
def test_the_graph_is_not_cut_for_a_small_input(engine, function, told) -> None:
    """It is copied sooner, unless the engine writes itself."""
    cache = torch.randn(1, 2, 16, 64)
    given = torch.tensor([5]), torch.randn(1, 2, 1, 64)
    expected = function(cache.clone(), *given)
    torch.testing.assert_close(compiled(function, engine)(cache, *given), expected)
    assert "left_to_torch" not in last().attempts[0].engine
    assert is_told() == told


def test_a_cache_of_dynamic_length_and_a_place_that_moves() -> None:
    """The place is a number in the program, as in Llama's own code."""

    def step(cache, new, at: int):
        cache[:, :, at : at + 1] = new.sin()
        return cache[:, :, : at + 1].relu()

    run = compiled(step, "onnxrt", min_coverage=0.0)
    for places, at in ((512, 3), (600, 4), (700, 9)):
        mine = torch.randn(1, 2, places, 64)
        eagers, new = mine.clone(), torch.randn(1, 2, 1, 64)
        torch.testing.assert_close(run(mine, new, at), step(eagers, new, at))
        torch.testing.assert_close(mine, eagers)
    assert (last().chosen, last().dynamic, is_told()) == ("onnxrt", True, True)


def test_two_caches_and_what_is_between() -> None:
    """Layer by layer: each region reads the cache that was written before it."""

    def layers(caches, at, x):
        for cache in caches:
            cache.index_copy_(2, at, x.sin())
            x = torch.softmax(x @ cache.transpose(2, 3), -1) @ cache
        return x

    mine = [torch.randn(1, 2, 512, 64) for _ in range(3)]
    eagers = [each.clone() for each in mine]
    run = compiled(layers, "onnxrt")
    for at in (3, 4):
        given = torch.tensor([at]), torch.randn(1, 2, 1, 64)
        torch.testing.assert_close(run(mine, *given), layers(eagers, *given))
        torch.testing.assert_close(mine, eagers)
    assert (last().chosen, last().attempts[0].coverage, is_told()) == ("onnxrt", 1.0, True)


def test_an_engine_that_fails_behind_a_write_is_answered_for(monkeypatch) -> None:
    """The floor writes to the same places, and what it reads is not what was written."""
    call, fails = BoundRegion.__call__, [False]

    def calls(self, *args):
        if fails[0] and any(isinstance(each, torch.Tensor) and each.dim() == 4 for each in args):
            raise RuntimeError("at the second region")
        return call(self, *args)

    def step(cache, at, new):
        cache[:, :, at] = new.view(-1).sin().view(1, 2, 1, 64)
        return (cache * 2).sum(-1)

    monkeypatch.setattr(BoundRegion, "__call__", calls)
    run, mine = compiled(step, "onnxrt"), torch.randn(1, 2, 512, 64)
    eagers = mine.clone()
    for at in (5, 9, 7):
        fails[0] = at == 9
        version, given = mine._version, (torch.tensor([at]), torch.randn(128))
        torch.testing.assert_close(run(mine, *given), step(eagers, *given))
        torch.testing.assert_close(mine, eagers)
        assert mine._version == version + 1
    assert (last().runtime.fallbacks, last().runtime.last_error) == (
        *(1, "RuntimeError: at the second region"),
    )


def test_an_engine_that_is_refused_has_written_to_nothing() -> None:
    """It is run once before it is accepted, on a copy of what it may write to."""
    cache = torch.randn(1, 2, 512, 64)
    before, given = cache.clone(), (torch.tensor([5]), torch.randn(1, 2, 1, 64))
    seen = []

    def reject(*_):
        seen.append(torch.equal(cache, before))
        raise RuntimeError("not this one")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer.chain.attempt._decline_low_coverage", reject)
        compiled(by_index, "onnxrt")(cache, *given)
    assert (seen, last().chosen) == ([True], "eager")


def test_grad_mode_does_not_matter_where_nothing_trains() -> None:
    """That is an inference graph, too."""
    with torch.enable_grad():
        same_as_eager(by_index, LAYOUTS["contiguous"], "onnxrt")
    assert is_told()


def test_torch_copies_nothing_onto_itself(run_python) -> None:
    """AOTAutograd copies back what is there already; in read-only memory that would be the end."""
    script = """
        import mmap, os, tempfile, warnings
        import torch
        warnings.simplefilter("ignore")
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 16))
            file.flush()
            memory = mmap.mmap(file.fileno(), 1 << 16, prot=mmap.PROT_READ)
            x = torch.frombuffer(memory, dtype=torch.float32).view(128, 128)
            x.copy_(x)
            x.detach().copy_(x)
            x.t().copy_(x.t())
            print("alive", flush=True)
            x.copy_(x + 1)
    """
    ended = run_python(textwrap.dedent(script))
    assert (ended.stdout, ended.returncode < 0) == ("alive\n", True)
