"""Molecules: the polar surface area of 5,000 compounds of the National Cancer Institute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import require_package
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

# Numbers of values per column: element and charge + 4 of an atom, and order of a bond.
ATOM, BOND = (119, 9), 22


class Molecules(Objective):
    """Regression of the topological polar surface area, in square angstroms, in rdkit's `Data/NCI/first_5k.tpsa.csv`.

    The targets were computed by Daylight's program. The area is a sum over polar atoms and their neighborhoods (Ertl et
    al. 2000), so a graph network can learn it. Molecules with the same Bemis-Murcko scaffold are in the same split, so
    validation measures the generalization to new scaffolds. A molecule without rings is its own scaffold.
    """

    name: ClassVar[str] = "molecules"
    metric = "rmse"
    direction = "minimize"
    epochs: ClassVar[int] = 12
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.005,
        "weight_decay": 0.01,
        "batch_size": 64,
        "schedule": "cosine",
        "layers": 3,
        "width": 32,
        "dropout": 0.0,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Suggest a graph network and the training settings."""
        return TrainConfig(
            lr=trial.suggest_float("lr", 3e-4, 3e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
            batch_size=trial.suggest_categorical("batch_size", [32, 64, 128]),
            schedule=trial.suggest_categorical("schedule", ["cosine", "one_cycle"]),
            model={
                "layers": trial.suggest_int("layers", 0, 4),
                "width": trial.suggest_int("width", 16, 64, log=True),
                "dropout": trial.suggest_float("dropout", 0.0, 0.2),
            },
        )

    def data(self, seed: int) -> Splits:
        """Return graphs (atoms [a, 2], bonds [b, 3]) and areas, split 60/20/20 by scaffold."""
        graphs, areas, scaffolds = load_molecules()
        return Splits.make(graphs, areas, seed=seed, groups=scaffolds, collate=collate_graphs)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return a network from atoms [a, 2], bonds [b, 3] and molecule sizes [n] to areas [n], in square angstroms."""
        return GraphNetwork(scale=float(train.y.std()), **{**self.default_config().model, **config.model})


def load_molecules() -> tuple[list[tuple[Tensor, Tensor]], list[float], list[str]]:
    """Return the graphs, polar surface areas and scaffolds of all molecules that rdkit can read."""
    with require_package("rdkit", "molecules"):
        from rdkit import Chem, RDConfig, rdBase
        from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
    from pathlib import Path

    graphs, areas, scaffolds = [], [], []
    get_scaffold: Any = MurckoScaffoldSmiles  # rdkit has stubs without types
    with rdBase.BlockLogs():  # rdkit would log the unreadable molecules
        for line in Path(RDConfig.RDDataDir, "NCI", "first_5k.tpsa.csv").read_text().splitlines()[1:]:
            smiles, area = line.split(",")
            if (molecule := Chem.MolFromSmiles(smiles)) is not None:
                graphs.append(build_graph(molecule))
                areas.append(float(area))
                scaffolds.append(get_scaffold(mol=molecule) or Chem.MolToSmiles(molecule))
    return graphs, areas, scaffolds


def build_graph(molecule: Any) -> tuple[Tensor, Tensor]:
    """Return atoms [a, 2] (element, charge + 4), and each bond once per direction [b, 3] (from, to, order)."""
    atoms = [(atom.GetAtomicNum(), atom.GetFormalCharge() + 4) for atom in molecule.GetAtoms()]
    bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx(), int(b.GetBondType())) for b in molecule.GetBonds()]
    both_ways = bonds + [(end, start, order) for start, end, order in bonds]
    return torch.tensor(atoms), torch.tensor(both_ways, dtype=torch.int64).reshape(-1, 3)


def collate_graphs(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the graphs of a batch as one graph with the number of atoms per molecule, and the areas [n]."""
    atoms, bonds = zip(*(graph for graph, _ in samples), strict=True)
    sizes = torch.tensor([len(part) for part in atoms])
    starts = sizes.cumsum(0) - sizes
    shifted = [part + torch.tensor([start, start, 0]) for part, start in zip(bonds, starts.tolist(), strict=True)]
    x = {"atoms": torch.cat(atoms), "bonds": torch.cat(shifted), "sizes": sizes}
    return x, torch.tensor([area for _, area in samples])


class GraphNetwork(nn.Module):
    """Message-passing network GINE (Hu et al. 2020) with bond features. A molecule's area is a sum over its atoms."""

    def __init__(self, scale: float, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.scale = scale
        self.atom = nn.ModuleList(nn.Embedding(values, width) for values in ATOM)
        self.bond = nn.ModuleList(nn.Embedding(BOND, width) for _ in range(layers))
        self.update = nn.ModuleList(build_mlp(width, width, dropout) for _ in range(layers))
        self.last = build_mlp(width, 1, dropout)

    def forward(self, atoms: Tensor, bonds: Tensor, sizes: Tensor) -> Tensor:
        """Return the areas [n] of molecules whose atoms are concatenated."""
        x = torch.stack([embed(column) for embed, column in zip(self.atom, atoms.unbind(1), strict=True)]).sum(dim=0)
        start, end, order = bonds.unbind(1)
        for embed, update in zip(self.bond, self.update, strict=True):
            messages = torch.relu(x[start] + embed(order))
            x = x + update(x + torch.zeros_like(x).index_add(0, end, messages))
        # The shape, not len(), which is a constant in an exported model.
        owner = torch.arange(sizes.shape[0], device=sizes.device).repeat_interleave(sizes, output_size=atoms.shape[0])
        contributions = self.last(x).squeeze(1) * self.scale
        return torch.zeros(sizes.shape[0], device=x.device).index_add(0, owner, contributions)


def build_mlp(width: int, outputs: int, dropout: float) -> nn.Sequential:
    """Return a network [a, width] -> [a, outputs] with layer norm and one hidden layer."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs)
    )
