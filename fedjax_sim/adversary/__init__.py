"""Attacks: what attackers send to the server, and what a curious server infers about the clients' data."""

from fedjax_sim.adversary.attacks import (
    alie,
    forged_weight,
    free_rider,
    gaussian_noise,
    inner_product,
    large_value,
    scaled,
    scaled_to,
    sign_flip,
    stale,
)
from fedjax_sim.adversary.backdoor import model_replacement
from fedjax_sim.adversary.byzantine import corrupted
from fedjax_sim.adversary.curious import View, each_message, masked_messages, released_model
from fedjax_sim.adversary.descent import (
    Rebuilt,
    cosine_distance,
    invert_by_optimization,
    local_steps,
    squared_distance,
    squared_norm,
    total_variation,
)
from fedjax_sim.adversary.embeddings import edge_scores, guessed_labels
from fedjax_sim.adversary.inversion import affine_rows, gradient_rank, invert_affine, recover_labels
from fedjax_sim.adversary.kinds import Alone, Honest, Omniscient, Together
from fedjax_sim.adversary.labels import label_scores
from fedjax_sim.adversary.membership import (
    advantage,
    alignment_score,
    auc,
    calibrated_score,
    loss_threshold_score,
    property_score,
    tpr_at_fpr,
)
from fedjax_sim.adversary.omniscient import adaptive, fang, mimic, min_max, min_sum
from fedjax_sim.adversary.shadow_clients import property_share
from fedjax_sim.adversary.shadow_models import (
    confidence_logit,
    confidence_logit_of_losses,
    likelihood_ratio_score,
    offline_likelihood_score,
    shadow_memberships,
)
from fedjax_sim.adversary.smashed import inversion_error, invert_smashed, labels_by_direction, labels_of_logits
from fedjax_sim.adversary.who import clients, number_of_attackers, poisoned, share_of_clients

__all__ = [
    "Alone",
    "Honest",
    "Omniscient",
    "Rebuilt",
    "Together",
    "View",
    "adaptive",
    "advantage",
    "affine_rows",
    "alie",
    "alignment_score",
    "auc",
    "calibrated_score",
    "clients",
    "confidence_logit",
    "confidence_logit_of_losses",
    "corrupted",
    "cosine_distance",
    "each_message",
    "edge_scores",
    "fang",
    "forged_weight",
    "free_rider",
    "gaussian_noise",
    "gradient_rank",
    "guessed_labels",
    "inner_product",
    "inversion_error",
    "invert_affine",
    "invert_by_optimization",
    "invert_smashed",
    "label_scores",
    "labels_by_direction",
    "labels_of_logits",
    "large_value",
    "likelihood_ratio_score",
    "local_steps",
    "loss_threshold_score",
    "masked_messages",
    "mimic",
    "min_max",
    "min_sum",
    "model_replacement",
    "number_of_attackers",
    "offline_likelihood_score",
    "poisoned",
    "property_score",
    "property_share",
    "recover_labels",
    "released_model",
    "scaled",
    "scaled_to",
    "shadow_memberships",
    "share_of_clients",
    "sign_flip",
    "squared_distance",
    "squared_norm",
    "stale",
    "total_variation",
    "tpr_at_fpr",
]
