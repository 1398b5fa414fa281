"""Attacks: what attackers send to the server, and what a curious server infers about the clients' data."""

from fedjax_sim.adversary.attacks import (
    alie as alie,
    forged_weight as forged_weight,
    free_rider as free_rider,
    gaussian_noise as gaussian_noise,
    inner_product as inner_product,
    large_value as large_value,
    scaled as scaled,
    scaled_to as scaled_to,
    sign_flip as sign_flip,
    stale as stale,
)
from fedjax_sim.adversary.backdoor import model_replacement as model_replacement
from fedjax_sim.adversary.byzantine import corrupted as corrupted
from fedjax_sim.adversary.curious import (
    View as View,
    each_message as each_message,
    masked_messages as masked_messages,
    released_model as released_model,
)
from fedjax_sim.adversary.descent import (
    Rebuilt as Rebuilt,
    cosine_distance as cosine_distance,
    invert_by_optimization as invert_by_optimization,
    local_steps as local_steps,
    squared_distance as squared_distance,
    squared_norm as squared_norm,
    total_variation as total_variation,
)
from fedjax_sim.adversary.embeddings import edge_scores as edge_scores, guessed_labels as guessed_labels
from fedjax_sim.adversary.inversion import (
    affine_rows as affine_rows,
    gradient_rank as gradient_rank,
    invert_affine as invert_affine,
    recover_labels as recover_labels,
)
from fedjax_sim.adversary.kinds import Alone as Alone, Honest as Honest, Omniscient as Omniscient, Together as Together
from fedjax_sim.adversary.labels import label_scores as label_scores
from fedjax_sim.adversary.membership import (
    advantage as advantage,
    alignment_score as alignment_score,
    auc as auc,
    calibrated_score as calibrated_score,
    loss_threshold_score as loss_threshold_score,
    property_score as property_score,
    tpr_at_fpr as tpr_at_fpr,
)
from fedjax_sim.adversary.omniscient import (
    adaptive as adaptive,
    fang as fang,
    mimic as mimic,
    min_max as min_max,
    min_sum as min_sum,
)
from fedjax_sim.adversary.shadow_clients import property_share as property_share
from fedjax_sim.adversary.shadow_models import (
    confidence_logit as confidence_logit,
    confidence_logit_of_losses as confidence_logit_of_losses,
    likelihood_ratio_score as likelihood_ratio_score,
    offline_likelihood_score as offline_likelihood_score,
    shadow_memberships as shadow_memberships,
)
from fedjax_sim.adversary.smashed import (
    inversion_error as inversion_error,
    invert_smashed as invert_smashed,
    labels_by_direction as labels_by_direction,
    labels_of_logits as labels_of_logits,
)
from fedjax_sim.adversary.who import (
    clients as clients,
    number_of_attackers as number_of_attackers,
    poisoned as poisoned,
    share_of_clients as share_of_clients,
)
