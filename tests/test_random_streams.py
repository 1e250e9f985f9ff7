"Blocks with a stream of their own and a world that draws: neither is touched by the other."
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from esper_nb import FitConfig, create_model, new_population
from esper_nb.core import generator, seeded

pytestmark = pytest.mark.usefixtures("one_thread")

class Own(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(nn.init.trunc_normal_(torch.empty(3, 4)))

DRAWS = dict(
    linear=lambda: nn.Linear(5, 3).weight, conv=lambda: nn.Conv2d(3, 4, 3).bias,
    lstm=lambda: nn.LSTM(3, 4).weight_hh_l0,
    embedding=lambda: nn.Embedding(5, 4).weight, attention=lambda: nn.MultiheadAttention(8, 2).in_proj_weight,
    orthogonal=lambda: nn.init.orthogonal_(torch.empty(4, 4)), sparse=lambda: nn.init.sparse_(torch.empty(6, 4), .5),
    truncated=lambda: Own().w, rand=lambda: torch.rand(7), randn=lambda: torch.randn(2, 9),
    large=lambda: torch.randn(999),
    randn_out=lambda: torch.randn(9, out=torch.empty(9)), double=lambda: torch.randn(5, dtype=torch.float64),
    like=lambda: torch.rand_like(torch.ones(3)), normal_like=lambda: torch.randn_like(torch.ones(3, 6)),
    int_like=lambda: torch.randint_like(torch.ones(5), 9), int_between=lambda: torch.randint_like(torch.ones(5), 2, 9),
    randint=lambda: torch.randint(9, (5,)), low=lambda: torch.randint(3, 9, (5,)), randperm=lambda: torch.randperm(11),
    normal=lambda: torch.normal(0., torch.ones(4)), normals=lambda: torch.normal(1., 2., (4,)),
    random=lambda: torch.empty(3, dtype=torch.int64).random_(), bernoulli=lambda: torch.bernoulli(torch.full((9,), .5)),
    exponential=lambda: torch.empty(4).exponential_(), multinomial=lambda: torch.multinomial(torch.ones(9), 3),
    poisson=lambda: torch.poisson(torch.full((5,), 4.)), gamma=lambda: torch.distributions.Gamma(2., 1.).sample((3,)),
    dropout=lambda: nn.Dropout(.5)(torch.ones(30)), native=lambda: torch.native_dropout(torch.ones(30), .5, True)[0],
    feature=lambda: nn.Dropout2d(.5)(torch.ones(2, 9, 2, 2)), rrelu=lambda: nn.RReLU()(-torch.ones(9)),
    pool=lambda: nn.FractionalMaxPool2d(2, output_size=3)(torch.arange(64.).view(1, 1, 8, 8)),
    recurrent=lambda: nn.LSTM(2, 3, 2, dropout=.5)(torch.ones(4, 1, 2))[0],
    attended=lambda: nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, 8), dropout_p=.5),
    given=lambda: torch.rand(3, generator=torch.Generator().manual_seed(4)),
    transformer=lambda: nn.TransformerEncoderLayer(8, 2, 16)(torch.ones(3, 1, 8)))


@pytest.mark.parametrize("name", DRAWS)
def test_a_stream_gives_what_the_global_generator_would_in_its_state(name):
    draw = DRAWS[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(generator(3, "x").get_state())
        expected = [draw().detach().clone() for _ in range(3)]
    world = torch.get_rng_state()
    with seeded(3, "x") as stream:
        found = [draw().detach().clone() for _ in range(3)]
        assert torch.equal(torch.get_rng_state(), world)
        if name not in ("given",): assert not torch.equal(stream.get_state(), generator(3, "x").get_state())
    assert all(map(torch.equal, found, expected)) and torch.equal(torch.get_rng_state(), world)


def test_blocks_inside_blocks_and_other_threads_have_their_own():
    with ThreadPoolExecutor(1) as other:
        torch.manual_seed(0)
        world = [torch.rand(4) for _ in range(6)]
        with seeded(1): one = [torch.rand(3) for _ in range(2)]
        with seeded(2): two = torch.rand(3)
        torch.manual_seed(0)
        seen = [torch.rand(4)]
        with seeded(1):
            got = [torch.rand(3)]
            seen.append(other.submit(torch.rand, 4).result()) # of the world
            with seeded(2):
                inner = torch.rand(3)
                seen.append(other.submit(torch.rand, 4).result())
            got.append(torch.rand(3))
        seen += [torch.rand(4) for _ in range(3)]
    assert all(map(torch.equal, seen, world)) and all(map(torch.equal, got, one)) and torch.equal(inner, two)


def grow(draw):
    "Make a population, germinate, reset and train beside `draw`, which is called inside every one of them."
    class Slow(nn.Linear):
        def reset_parameters(self):
            draw()
            super().reset_parameters()
            draw()
    with seeded(5): layer = Slow(3, 4)
    model = create_model("digits", ["r0c1"], num_lanes=2)
    model.germinate("r0c1", "norm")
    model.reset([1], seed=3)
    pop = new_population("digits", FitConfig(lanes=2, epochs=1))
    return [layer.weight, *model.state_dict().values(), *pop.model.state_dict().values()]

def test_a_run_and_a_cell_that_draws_do_not_see_each_other():
    torch.manual_seed(0)
    world = torch.rand(400)
    alone = grow(lambda: None)
    torch.manual_seed(0)
    drawn = []
    with ThreadPoolExecutor(1) as other:
        beside = grow(lambda: drawn.append(other.submit(torch.rand, 7).result()))
        assert all(map(torch.equal, alone, beside))
        busy = other.submit(lambda: [torch.rand(7) for _ in range(20)])
        again = grow(lambda: None)
        drawn += busy.result()
    assert all(map(torch.equal, alone, again))
    torch.manual_seed(0)
    assert all(torch.equal(x, torch.rand(7)) for x in drawn) and len(drawn) == 22 and len(world) == 400


