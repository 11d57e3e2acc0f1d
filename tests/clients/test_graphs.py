"""Batches of graphs of torch_geometric: each replica gets whole graphs, and trains as one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, SAGEConv, global_mean_pool, to_hetero

import lockstep as ls
from lockstep.data.readers import batch_digest
from lockstep.data.sharding import split_batch
from lockstep.errors import DataError

GRAPHS, ROWS = 53, 8
"""Seven batches; the last has 5 graphs."""


class Pairs(Data):
    """A graph with an attribute of its own that counts nodes, and one of nodes of another kind."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.num_nodes if key == "partner" else super().__inc__(key, value, *args, **kwargs)


def graph(random: torch.Generator, number: int) -> Data:
    nodes = int(torch.randint(2, 7, (1,), generator=random))
    return Pairs(
        x=torch.randn(nodes, 5, generator=random, dtype=torch.float64),
        edge_index=torch.randint(0, nodes, (2, 2 * nodes), generator=random),
        partner=torch.randint(0, nodes, (nodes,), generator=random),
        y=torch.randint(0, 3, (1,), generator=random),
        node_y=torch.randint(0, 3, (nodes,), generator=random),
        name=f"graph {number}",
    )


def graphs() -> list[Data]:
    random = torch.Generator().manual_seed(0)
    return [graph(random, number) for number in range(GRAPHS)]


def hetero() -> list[HeteroData]:
    random = torch.Generator().manual_seed(1)
    made = []
    for _ in range(GRAPHS):
        data, (users, items) = HeteroData(), torch.randint(1, 5, (2,), generator=random).tolist()
        data["user"].x = torch.randn(users, 4, generator=random, dtype=torch.float64)
        data["item"].x = torch.randn(items, 4, generator=random, dtype=torch.float64)
        for source, target, count in (("user", "item", users), ("item", "user", items)):
            ends = [torch.randint(0, size, (count * 2,), generator=random) for size in (count, users + items - count)]
            data[source, "to", target].edge_index = torch.stack(ends)
        data.y = torch.randint(0, 3, (1,), generator=random)
        made.append(data)
    return made


def loader(examples: list[Any], **settings: Any) -> DataLoader:
    return DataLoader(examples, batch_size=ROWS, **settings)


class Net(nn.Module):
    """Scores of each graph, and of each node."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = GCNConv(5, 8).double(), GCNConv(8, 8).double()
        self.of_graph, self.of_node = nn.Linear(8, 3).double(), nn.Linear(8, 3).double()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        nodes = self.first(batch.x, batch.edge_index).tanh()
        nodes = self.second(nodes + nodes[batch.partner], batch.edge_index).tanh()
        return self.of_graph(global_mean_pool(nodes, batch.batch, batch.num_graphs)), self.of_node(nodes)


def losses_of(net: nn.Module, batch: Any, level: str) -> Tensor:
    of_graphs, of_nodes = net(batch)
    pair = (of_graphs, batch.y) if level == "graph" else (of_nodes, batch.node_y)
    return F.cross_entropy(*pair, reduction="none")


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.3)


@cache
def one_device(level: str) -> dict[str, Tensor]:
    net = Net()
    optimizer = optimizer_of(net)
    for batch in loader(graphs()):
        losses_of(net, batch, level).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def trained(strategy: Any, level: str, data: Any = None, *, mean: bool = False) -> dict[str, Tensor]:
    net = Net()
    model, optimizer = strategy.mirror(net), strategy.mirror(optimizer_of(net))

    def step(batch: Any) -> None:
        losses = losses_of(model, batch, level)
        # compute_average_loss counts what there is a loss of: graphs, or the nodes of all replicas.
        (losses.mean() if mean else ls.compute_average_loss(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in strategy.distribute_dataset(loader(graphs()) if data is None else data):
        strategy.run(step, (batch,))
    return {key: value.clone() for key, value in net.state_dict().items()}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("level", ["graph", "node"])
def test_a_loop_trains_as_one_device(level: str, replicas: int, make_strategy: Any):
    torch.testing.assert_close(trained(make_strategy(replicas), level), one_device(level), rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["graph", "node"])
def test_a_mean_over_a_shard_s_nodes_or_graphs_is_warned_of(level: str, make_strategy: Any):
    with pytest.warns(UserWarning, match="mean over each replica's rows"):
        trained(make_strategy(2), level, mean=True)


def test_fit_evaluate_and_predict_take_graphs_with_their_labels(make_strategy: Any):
    class OfGraphs(Net):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch)[0]

    data = [(batch, batch.y) for batch in loader(graphs())]
    strategy, net, alone = make_strategy(3), OfGraphs(), OfGraphs()
    with strategy.scope():
        model = ls.Model(net)
        model.compile(optimizer=optimizer_of(net), loss=nn.CrossEntropyLoss(), metrics={"accuracy": "accuracy"})
        model.fit(data, verbose=0)
        weights = {name: weight for name, weight in net.state_dict().items() if not name.startswith("of_node")}
        torch.testing.assert_close(weights, {name: one_device("graph")[name] for name in weights}, rtol=0, atol=1e-12)
        alone.load_state_dict(one_device("graph"))
        outputs = torch.cat([alone(batch) for batch, _ in data]).detach()
        labels = torch.cat([y for _, y in data])
        torch.testing.assert_close(model.predict(data), outputs, rtol=0, atol=1e-12)
        logs = model.evaluate(data, verbose=0)
    assert logs["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item())
    assert logs["accuracy"] == pytest.approx((outputs.argmax(1) == labels).float().mean().item())


def test_fit_takes_a_loss_of_nodes_as_total_and_count(make_strategy: Any):
    class OfNodes(Net):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch)[1]

    def loss(scores: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(scores, batch.node_y, reduction="sum"), len(scores)

    strategy, net = make_strategy(3), OfNodes()
    with strategy.scope():
        model = ls.Model(net)
        model.compile(optimizer=optimizer_of(net), loss=loss)
        model.fit([(batch, batch) for batch in loader(graphs())], verbose=0)
    weights = {name: weight for name, weight in net.state_dict().items() if not name.startswith("of_graph")}
    torch.testing.assert_close(weights, {name: one_device("node")[name] for name in weights}, rtol=0, atol=1e-12)


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same attributes, to the last bit, and are of one type."""
    if type(one) is not type(other) or len(one) != len(other) or len(one.stores) != len(other.stores):
        return False
    for first, second in zip(one.stores, other.stores, strict=True):
        if list(first) != list(second):
            return False
        for name in first:
            is_tensor = isinstance(first[name], Tensor)
            if not (torch.equal(first[name], second[name]) if is_tensor else first[name] == second[name]):
                return False
    return True


@pytest.mark.parametrize("follow", [[], ["x"]])
@pytest.mark.parametrize("make", [graphs, hetero])
def test_a_shard_is_the_batch_of_its_graphs(make: Callable[[], list[Any]], follow: list[str]):
    examples = make()[:5]
    shards = split_batch(Batch.from_data_list(examples, follow_batch=follow), 3)
    expected = [Batch.from_data_list(examples[at], follow_batch=follow) for at in (slice(2), slice(2, 4), slice(4, 5))]
    assert all(map(same, shards, expected))


@pytest.mark.parametrize("make", [graphs, hetero])
def test_a_shard_without_graphs_has_none_of_their_nodes(make: Callable[[], list[Any]]):
    first, second = split_batch(Batch.from_data_list(make()[:1], follow_batch=["x"]), 2)
    assert (len(first), len(second), ls.has_rows(first), ls.has_rows(second)) == (1, 0, True, False)
    assert type(first) is type(second)
    for with_graphs, without in zip(first.stores, second.stores, strict=True):
        assert list(with_graphs) == list(without)
        for name, value in without.items():
            if name == "edge_index":
                assert value.shape == (2, 0)
            elif name.endswith("ptr"):
                assert value.tolist() == [0]
            elif name == "x":
                assert value.shape == (0, with_graphs.x.shape[1])
            else:
                assert len(value) == 0


def test_a_batch_with_fewer_graphs_than_replicas_trains_as_one_device(make_strategy: Any):
    net, alone = Net(), Net()
    strategy = make_strategy(3)
    model, optimizer = strategy.mirror(net), strategy.mirror(optimizer_of(net))

    def step(batch: Any) -> None:
        losses = losses_of(model, batch, "graph") if ls.has_rows(batch) else torch.zeros(0)
        loss = ls.compute_average_loss(losses)
        if ls.has_rows(batch):
            loss.backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(loader(graphs()[:2])):
        strategy.run(step, (batch,))
    one = optimizer_of(alone)
    losses_of(alone, Batch.from_data_list(graphs()[:2]), "graph").mean().backward()
    one.step()
    torch.testing.assert_close(net.state_dict(), alone.state_dict(), rtol=0, atol=1e-12)


def test_graphs_of_several_types_train_as_one_device(make_strategy: Any):
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SAGEConv(4, 6), SAGEConv(6, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).tanh(), edge_index)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return to_hetero(Convolutions(), hetero()[0].metadata()).double()

    def losses(net: nn.Module, batch: Any) -> Tensor:
        nodes = net(batch.x_dict, batch.edge_index_dict)["user"]
        return F.cross_entropy(
            global_mean_pool(nodes, batch["user"].batch, batch.num_graphs), batch.y, reduction="none"
        )

    net, alone = network(), network()
    strategy = make_strategy(3)
    model, optimizer, one = strategy.mirror(net), strategy.mirror(optimizer_of(net)), optimizer_of(alone)

    def step(batch: Any) -> None:
        ls.compute_average_loss(losses(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch, whole in zip(strategy.distribute_dataset(loader(hetero())), loader(hetero()), strict=True):
        strategy.run(step, (batch,))
        losses(alone, whole).mean().backward()
        one.step()
        one.zero_grad()
    torch.testing.assert_close(net.state_dict(), alone.state_dict(), rtol=0, atol=1e-12)


def test_what_cannot_be_told_is_refused():
    batch = Batch.from_data_list(graphs()[:4])
    batch.degree = torch.ones(batch.num_nodes)
    with pytest.raises(DataError, match=r"'degree' of a Batch .* was set after the graphs were batched"):
        split_batch(batch, 2)
    batch = Batch.from_data_list(graphs()[:4])
    batch.edge_index = torch.cat([batch.edge_index, torch.arange(batch.num_nodes).expand(2, -1)], dim=1)
    with pytest.raises(DataError, match="'edge_index' of a Batch"):
        split_batch(batch, 2)
    by_hand = Batch(x=torch.ones(3, 2), batch=torch.tensor([0, 0, 1]), ptr=torch.tensor([0, 2, 3]))
    with pytest.raises(DataError, match=r"not made by Batch\.from_data_list"):
        split_batch(by_hand, 2)
    with pytest.raises(DataError, match="one graph is not divided: give a Batch of several"):
        split_batch((graphs()[0], torch.ones(1)), 2)


def test_one_replica_gets_the_batch_itself():
    batch = Batch.from_data_list(graphs()[:4])
    batch.degree = torch.ones(batch.num_nodes)
    assert split_batch(batch, 1)[0] is batch


def test_other_graphs_on_another_worker_are_told():
    one, other = (Batch.from_data_list(examples[:4]) for examples in (graphs(), graphs()[::-1]))
    assert batch_digest([one]) == batch_digest([Batch.from_data_list(graphs()[:4])]) != batch_digest([other])


WORKERS = (2, 1)


def job() -> dict[str, Any]:
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    devices = [f"cpu:{number}" for number in range(WORKERS[int(os.environ["RANK"])])]
    strategy = ls.MultiWorkerMirroredStrategy(devices, communication=ls.CommunicationOptions(lost_after_s=60))
    weights = {level: trained(strategy, level) for level in ("graph", "node")}
    weights["a list"] = trained(strategy, "node", list(loader(graphs())))  # read whole by each, and cut
    strategy.close()
    return weights


@cache
def of_workers() -> dict[str, Any]:
    return ls.launch(job, workers=len(WORKERS), timeout_s=200)


@pytest.mark.workers
@pytest.mark.parametrize(("trained_as", "level"), [("graph", "graph"), ("node", "node"), ("a list", "node")])
def test_workers_train_as_one_device(trained_as: str, level: str):
    torch.testing.assert_close(of_workers()[trained_as], one_device(level), rtol=0, atol=1e-12)


def test_the_bits_are_the_same_with_processes_that_load(split_cpu: Any):
    found = []
    for processes in (0, 1):
        with closing(ls.MirroredStrategy(split_cpu(1), replicas=3)) as strategy:
            found.append(trained(strategy, "node", loader(graphs(), num_workers=processes)))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
