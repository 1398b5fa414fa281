"""Checks arguments, with one format for all errors: `name: expected RULE, got VALUE. HINT`."""

from fedjax_sim.validate.annotations import (
    Checked as Checked,
    Choice as Choice,
    Default as Default,
    Finite as Finite,
    FromData as FromData,
    Integer as Integer,
    LossFn as LossFn,
    NonNegative as NonNegative,
    NonNegativeInt as NonNegativeInt,
    Number as Number,
    NumFeatures as NumFeatures,
    NumOutputs as NumOutputs,
    OpenShare as OpenShare,
    PopulationSize as PopulationSize,
    Positive as Positive,
    PositiveInt as PositiveInt,
    PositiveShare as PositiveShare,
    Share as Share,
    ShareBelowOne as ShareBelowOne,
    Steps as Steps,
    Truth as Truth,
)
from fedjax_sim.validate.arguments import (
    named_arguments as named_arguments,
)
from fedjax_sim.validate.checks import (
    INT32_MAX as INT32_MAX,
    LARGEST as LARGEST,
    MOST_STEPS as MOST_STEPS,
    SMALLEST as SMALLEST,
    as_written as as_written,
    decimal as decimal,
    fits_in_memory as fits_in_memory,
    floating_parameters as floating_parameters,
    function as function,
    in_range as in_range,
    integer as integer,
    loss_function as loss_function,
    one_of as one_of,
    optax_transformation as optax_transformation,
    part as part,
    positive as positive,
    sequence as sequence,
    steps as steps,
    truth as truth,
)
from fedjax_sim.validate.contraction import (
    contraction as contraction,
)
from fedjax_sim.validate.errors import (
    InvalidArgument as InvalidArgument,
    InvalidType as InvalidType,
    fail as fail,
    nearest as nearest,
)
