"""This subpackage holds populations and federated data sets: which clients exist, and what data each of them holds."""

from __future__ import annotations

from fedjax_sim.population import partitioners
from fedjax_sim.population.concept_shift import (
    ConceptShift,
    clusters_of,
    with_permuted_labels,
    with_rotated_images,
)
from fedjax_sim.population.datasets.csv_sites import csv_sites, heart_disease
from fedjax_sim.population.datasets.feature_shift import feature_shift
from fedjax_sim.population.datasets.image_files import cifar10, cifar100, mnist
from fedjax_sim.population.datasets.images import synthetic_images
from fedjax_sim.population.datasets.industrial import controller_tuning, overshoot, sensor_calibration
from fedjax_sim.population.datasets.leaf_features import celeba, sent140
from fedjax_sim.population.datasets.leaf_tff import leaf, tff_hdf5
from fedjax_sim.population.datasets.libsvm import libsvm
from fedjax_sim.population.datasets.mixture import mixture
from fedjax_sim.population.datasets.native import native, write_native
from fedjax_sim.population.datasets.quadratic import quadratic_loss, quadratic_population, quadratics
from fedjax_sim.population.datasets.shakespeare import shakespeare
from fedjax_sim.population.datasets.sklearn import breast_cancer, digits, digits_partition
from fedjax_sim.population.datasets.synthetic import linear_teacher, logistic_teacher, mean_estimation, synthetic
from fedjax_sim.population.datasets.table import from_table, table
from fedjax_sim.population.datasets.tff_text import tff_text
from fedjax_sim.population.federated_data import FederatedData, from_sites
from fedjax_sim.population.graph.graphs import cora, karate_club, molecules, node_data, stochastic_blocks
from fedjax_sim.population.graph.link_prediction import link_data, with_links
from fedjax_sim.population.graph.partition import (
    Parties,
    edge_owners,
    graph_data,
    neighbourhoods,
    node_owners,
    parties_of,
)
from fedjax_sim.population.groups.grouped import Group, Grouped, grouped
from fedjax_sim.population.groups.with_groups import with_groups
from fedjax_sim.population.host import Host, host_store
from fedjax_sim.population.members import Members, without_clients
from fedjax_sim.population.own_test_rows import with_local_test
from fedjax_sim.population.partition import (
    Partition,
    by_group,
    dirichlet,
    dirichlet_draws,
    iid,
    pathological,
    quantity_lognormal,
    quantity_power_law,
    shards,
)
from fedjax_sim.population.poisoned.backdoors import backdoor, edge_case_backdoor
from fedjax_sim.population.poisoned.labels import label_flip, label_offset, random_labels
from fedjax_sim.population.poisoned.poisoning import Poisoned, constrained, poisoned
from fedjax_sim.population.poisoned.triggers import Trigger, pixels, set_points, spectral, tag
from fedjax_sim.population.population import (
    Generated,
    Indexed,
    Stored,
    from_clients,
    generated,
    indexed,
    pooled,
    stored,
)
from fedjax_sim.population.private_labels import PrivateLabels, with_private_labels
from fedjax_sim.population.public_preparation import with_public_preparation
from fedjax_sim.population.server_rows import with_server_rows
from fedjax_sim.population.store import read_store, write_store
from fedjax_sim.population.vertical.private_set_intersection import (
    Alignment,
    align_diffie_hellman,
    align_exact,
    align_keyed,
)
from fedjax_sim.population.vertical.record_linkage import align_similar, bloom_filters, dice
from fedjax_sim.population.vertical.vertical import joined, with_parties

__all__ = [
    "Alignment",
    "ConceptShift",
    "FederatedData",
    "Generated",
    "Group",
    "Grouped",
    "Host",
    "Indexed",
    "Members",
    "Parties",
    "Partition",
    "Poisoned",
    "PrivateLabels",
    "Stored",
    "Trigger",
    "align_diffie_hellman",
    "align_exact",
    "align_keyed",
    "align_similar",
    "backdoor",
    "bloom_filters",
    "breast_cancer",
    "by_group",
    "celeba",
    "cifar10",
    "cifar100",
    "clusters_of",
    "constrained",
    "controller_tuning",
    "cora",
    "csv_sites",
    "dice",
    "digits",
    "digits_partition",
    "dirichlet",
    "dirichlet_draws",
    "edge_case_backdoor",
    "edge_owners",
    "feature_shift",
    "from_clients",
    "from_sites",
    "from_table",
    "generated",
    "graph_data",
    "grouped",
    "heart_disease",
    "host_store",
    "iid",
    "indexed",
    "joined",
    "karate_club",
    "label_flip",
    "label_offset",
    "leaf",
    "libsvm",
    "linear_teacher",
    "link_data",
    "logistic_teacher",
    "mean_estimation",
    "mixture",
    "mnist",
    "molecules",
    "native",
    "neighbourhoods",
    "node_data",
    "node_owners",
    "overshoot",
    "parties_of",
    "partitioners",
    "pathological",
    "pixels",
    "poisoned",
    "pooled",
    "quadratic_loss",
    "quadratic_population",
    "quadratics",
    "quantity_lognormal",
    "quantity_power_law",
    "random_labels",
    "read_store",
    "sensor_calibration",
    "sent140",
    "set_points",
    "shakespeare",
    "shards",
    "spectral",
    "stochastic_blocks",
    "stored",
    "synthetic",
    "synthetic_images",
    "table",
    "tag",
    "tff_hdf5",
    "tff_text",
    "with_groups",
    "with_links",
    "with_local_test",
    "with_parties",
    "with_permuted_labels",
    "with_private_labels",
    "with_public_preparation",
    "with_rotated_images",
    "with_server_rows",
    "without_clients",
    "write_native",
    "write_store",
]
