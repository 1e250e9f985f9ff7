# What grow offers to other packages; written by `python scripts/notebooks.py door`
from .blending import (Steepness as Steepness, Curve as Curve, progress as progress, RampMode as RampMode,
    Ramp as Ramp, spread as spread, Blend as Blend, combine as combine, straight_through as straight_through,
    BlendGate as BlendGate)
from .blueprints import (FAMILIES as FAMILIES, SEED_LAYOUTS as SEED_LAYOUTS, Blueprint as Blueprint,
    blueprint as blueprint, forget_blueprint as forget_blueprint, list_blueprints as list_blueprints,
    get_blueprint as get_blueprint, make_blueprint as make_blueprint, open_relu as open_relu, Residual as Residual,
    norm_groups as norm_groups, Noop as Noop, NormSeed as NormSeed, SqueezeExcite as SqueezeExcite,
    norm_seed as norm_seed, depthwise as depthwise, bottleneck as bottleneck, conv_small as conv_small,
    conv_light as conv_light, conv_heavy as conv_heavy, LaneMLP as LaneMLP, LaneFlexAttention as LaneFlexAttention,
    layer_norm_seed as layer_norm_seed, lora as lora, lora_large as lora_large, causal_attention as causal_attention,
    flex_causal_attention as flex_causal_attention, mlp_small as mlp_small, mlp as mlp,
    blueprint_size as blueprint_size, probe as probe, smoke_test as smoke_test, plain_blueprint as plain_blueprint,
    PlainSeed as PlainSeed, seed_ports as seed_ports, turned as turned, out_of_place as out_of_place)
from .export import (export_model as export_model, plain_module as plain_module, Form as Form,
    grown_forms as grown_forms, settle_weights as settle_weights, check_finite as check_finite,
    check_same as check_same, serve_optimizer as serve_optimizer, ServedOptimizer as ServedOptimizer)
from .hosts import (WORTHWHILE as WORTHWHILE, Site as Site, Host as Host,
    run_again_in_backward as run_again_in_backward, CNNConfig as CNNConfig, CNNHost as CNNHost,
    GPTConfig as GPTConfig, GPTBlock as GPTBlock, GPTHost as GPTHost, new_host as new_host,
    count_parameters as count_parameters)
from .lifecycle import (MOVES as MOVES, UPWARD as UPWARD, ACTIVE as ACTIVE, LIVE as LIVE, COOLING as COOLING,
    SHORT_LIFE as SHORT_LIFE, COLUMNS as COLUMNS, UNMEASURED as UNMEASURED, Stage as Stage, check_move as check_move,
    next_stage as next_stage, Gates as Gates, Rules as Rules, GateResult as GateResult, Event as Event,
    Reason as Reason, SeedState as SeedState, check_gate as check_gate, encode_seed as encode_seed,
    decode_seed as decode_seed, empty_table as empty_table)
from .models import (MAX_BRANCHES as MAX_BRANCHES, DECISION_VERBS as DECISION_VERBS, refuse_shards as refuse_shards,
    Growing as Growing, GrowingModel as GrowingModel, combinations_of as combinations_of,
    ParameterCounts as ParameterCounts, Status as Status, Decision as Decision, DecisionResult as DecisionResult,
    apply_decision as apply_decision, as_decisions as as_decisions, apply_decisions as apply_decisions)
from .module_hosts import (LABELLED_TOKENS as LABELLED_TOKENS, HostConfig as HostConfig, READS as READS,
    LAYOUTS as LAYOUTS, FIRST_AXIS as FIRST_AXIS, LAST_AXIS as LAST_AXIS, AttachedModel as AttachedModel,
    attach_slots as attach_slots, ModuleHostConfig as ModuleHostConfig, PickOutput as PickOutput, Place as Place,
    Explored as Explored, explore_host as explore_host, module_model as module_model, ModuleHost as ModuleHost,
    host_sites as host_sites, check_slots as check_slots, import_path as import_path,
    given_factories as given_factories, get_factory as get_factory, Reading as Reading, read_as as read_as,
    FeatureLayout as FeatureLayout, to_slot as to_slot, from_slot as from_slot, choose_layout as choose_layout,
    Call as Call, FeatureSeen as FeatureSeen, find_features as find_features, check_owner as check_owner,
    draw_afresh as draw_afresh)
from .slots import (Lanes as Lanes, SeedChanges as SeedChanges, Numbers as Numbers, Move as Move, Role as Role,
    find_roles as find_roles, Route as Route, lanes_inside as lanes_inside, lanes_folded as lanes_folded,
    merge_runs as merge_runs, Cut as Cut, LanesOf as LanesOf, Scratch as Scratch, as_lanes as as_lanes,
    evaluating as evaluating, change_seeds as change_seeds, tick_seeds as tick_seeds, read_fresh as read_fresh,
    measured_lanes as measured_lanes, fitting_blueprints as fitting_blueprints, empty_banks as empty_banks,
    Slot as Slot)
