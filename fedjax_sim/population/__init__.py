"""This subpackage holds populations and federated data sets: which clients exist, and what data each of them holds."""

from __future__ import annotations

from fedjax_sim.population import partitioners as partitioners
from fedjax_sim.population.concept_shift import (
    ConceptShift as ConceptShift,
    clusters_of as clusters_of,
    with_permuted_labels as with_permuted_labels,
    with_rotated_images as with_rotated_images,
)
from fedjax_sim.population.datasets.csv_sites import csv_sites as csv_sites, heart_disease as heart_disease
from fedjax_sim.population.datasets.fcube import fcube as fcube
from fedjax_sim.population.datasets.feature_shift import feature_shift as feature_shift
from fedjax_sim.population.datasets.image_files import (
    cifar10 as cifar10,
    cifar100 as cifar100,
    emnist as emnist,
    mnist as mnist,
    svhn as svhn,
)
from fedjax_sim.population.datasets.images import synthetic_images as synthetic_images
from fedjax_sim.population.datasets.industrial import (
    controller_tuning as controller_tuning,
    overshoot as overshoot,
    sensor_calibration as sensor_calibration,
)
from fedjax_sim.population.datasets.leaf_features import celeba as celeba, sent140 as sent140
from fedjax_sim.population.datasets.leaf_tff import leaf as leaf, tff_hdf5 as tff_hdf5
from fedjax_sim.population.datasets.libsvm import libsvm as libsvm
from fedjax_sim.population.datasets.mixture import mixture as mixture
from fedjax_sim.population.datasets.native import native as native, write_native as write_native
from fedjax_sim.population.datasets.pfllib import pfllib as pfllib
from fedjax_sim.population.datasets.quadratic import (
    quadratic_loss as quadratic_loss,
    quadratic_population as quadratic_population,
    quadratics as quadratics,
)
from fedjax_sim.population.datasets.shakespeare import shakespeare as shakespeare
from fedjax_sim.population.datasets.sklearn import (
    breast_cancer as breast_cancer,
    digits as digits,
    digits_partition as digits_partition,
)
from fedjax_sim.population.datasets.synthetic import (
    linear_teacher as linear_teacher,
    logistic_teacher as logistic_teacher,
    mean_estimation as mean_estimation,
    synthetic as synthetic,
)
from fedjax_sim.population.datasets.table import from_table as from_table, table as table
from fedjax_sim.population.datasets.tff_text import tff_text as tff_text
from fedjax_sim.population.federated_data import FederatedData as FederatedData, from_sites as from_sites
from fedjax_sim.population.graph.graphs import (
    cora as cora,
    karate_club as karate_club,
    molecules as molecules,
    node_data as node_data,
    stochastic_blocks as stochastic_blocks,
)
from fedjax_sim.population.graph.link_prediction import link_data as link_data, with_links as with_links
from fedjax_sim.population.graph.partition import (
    Parties as Parties,
    edge_owners as edge_owners,
    graph_data as graph_data,
    neighbourhoods as neighbourhoods,
    node_owners as node_owners,
    parties_of as parties_of,
)
from fedjax_sim.population.groups.grouped import Group as Group, Grouped as Grouped, grouped as grouped
from fedjax_sim.population.groups.with_groups import with_groups as with_groups
from fedjax_sim.population.host import Host as Host, host_store as host_store
from fedjax_sim.population.members import Members as Members, without_clients as without_clients
from fedjax_sim.population.own_test_rows import with_local_test as with_local_test
from fedjax_sim.population.partition import (
    Partition as Partition,
    by_group as by_group,
    dirichlet as dirichlet,
    dirichlet_draws as dirichlet_draws,
    dirichlet_of_sizes as dirichlet_of_sizes,
    iid as iid,
    pathological as pathological,
    quantity_exponential as quantity_exponential,
    quantity_given as quantity_given,
    quantity_linear as quantity_linear,
    quantity_lognormal as quantity_lognormal,
    quantity_power_law as quantity_power_law,
    shards as shards,
)
from fedjax_sim.population.poisoned.backdoors import backdoor as backdoor, edge_case_backdoor as edge_case_backdoor
from fedjax_sim.population.poisoned.labels import (
    label_flip as label_flip,
    label_offset as label_offset,
    random_labels as random_labels,
)
from fedjax_sim.population.poisoned.poisoning import (
    Poisoned as Poisoned,
    constrained as constrained,
    poisoned as poisoned,
)
from fedjax_sim.population.poisoned.triggers import (
    Trigger as Trigger,
    pixels as pixels,
    set_points as set_points,
    spectral as spectral,
    tag as tag,
)
from fedjax_sim.population.population import (
    Generated as Generated,
    Indexed as Indexed,
    Stored as Stored,
    from_clients as from_clients,
    generated as generated,
    indexed as indexed,
    pooled as pooled,
    stored as stored,
)
from fedjax_sim.population.private_labels import (
    PrivateLabels as PrivateLabels,
    with_private_labels as with_private_labels,
)
from fedjax_sim.population.public_preparation import with_public_preparation as with_public_preparation
from fedjax_sim.population.server_rows import with_server_rows as with_server_rows
from fedjax_sim.population.store import read_store as read_store, write_store as write_store
from fedjax_sim.population.vertical.private_set_intersection import (
    Alignment as Alignment,
    align_diffie_hellman as align_diffie_hellman,
    align_exact as align_exact,
    align_keyed as align_keyed,
)
from fedjax_sim.population.vertical.record_linkage import (
    align_similar as align_similar,
    bloom_filters as bloom_filters,
    dice as dice,
)
from fedjax_sim.population.vertical.vertical import joined as joined, with_parties as with_parties
