# What core offers to other packages; written by `python scripts/notebooks.py door`
from .config import (Count as Count, Whole as Whole, Positive as Positive, NonNegative as NonNegative,
    Multiple as Multiple, PositiveOrInf as PositiveOrInf, Share as Share, PositiveShare as PositiveShare,
    ShareBelow1 as ShareBelow1, RandomSeed as RandomSeed, check as check, check_count as check_count,
    check_names as check_names, whole_numbers as whole_numbers, printable as printable, listed as listed,
    one_of as one_of, Range as Range, OneOf as OneOf, check_type as check_type, Config as Config,
    find_hint as find_hint, read_setting as read_setting, parse_settings as parse_settings,
    hint_to_json as hint_to_json, hint_from_json as hint_from_json, changed_settings as changed_settings,
    option_text as option_text)
from .devices import (NO_FLOAT64 as NO_FLOAT64, Precision as Precision, choose_precision as choose_precision,
    check_device as check_device, check_devices as check_devices, as_double as as_double, wait_for as wait_for,
    send as send, activation_room as activation_room, free_bytes as free_bytes, bytes_text as bytes_text,
    check_memory as check_memory, repeatable as repeatable, keep_freed_memory as keep_freed_memory,
    generator as generator, seeded as seeded)
from .files import (LEASE_SECONDS as LEASE_SECONDS, as_path as as_path, check_folder as check_folder,
    check_output as check_output, new_file as new_file, flush_file as flush_file, refuse_link as refuse_link,
    plain_json as plain_json, json_digest as json_digest, write_json as write_json, read_json as read_json,
    FolderLock as FolderLock, Lease as Lease)
from .fused import (BLOCK as BLOCK, rows_of as rows_of, windows_of as windows_of, measure as measure, scale as scale,
    rectify as rectify, rectify_back as rectify_back, pool_windows as pool_windows, pool_back as pool_back,
    Kernels as Kernels, compiled as compiled, has_numba as has_numba, Scaling as Scaling, can_fuse as can_fuse,
    norm_relu as norm_relu)
from .hooks import (quiet_hooks as quiet_hooks, sweep_hooks as sweep_hooks, is_inside_step as is_inside_step,
    writes_only_state as writes_only_state, hook_steps as hook_steps)
from .intervals import (middle_weights as middle_weights, interquartile_mean as interquartile_mean,
    Interval as Interval, bootstrap_interval as bootstrap_interval, finite_or_none as finite_or_none,
    Measure as Measure)
from .lanes import (num_lanes as num_lanes, lane_state as lane_state, rewiden as rewiden, with_lanes as with_lanes,
    lane_index as lane_index, index_for as index_for, lane_runs as lane_runs, put_lanes as put_lanes,
    take_lanes as take_lanes, lane as lane, reset_lanes as reset_lanes, repeated as repeated,
    own_tensors as own_tensors, widen_module as widen_module, map_tensors as map_tensors, drawing as drawing,
    PerLane as PerLane, per_lane as per_lane)
from .layers import (FEW_CHANNELS as FEW_CHANNELS, unfold as unfold, fold as fold, by_lane as by_lane,
    spatial_mean as spatial_mean, LaneConv2d as LaneConv2d, with_zeros as with_zeros, MaskedConv2d as MaskedConv2d,
    conv2d as conv2d, SafeGroupNorm as SafeGroupNorm, group_norm as group_norm, LaneBatchNorm2d as LaneBatchNorm2d,
    lane_linear as lane_linear, LaneLinear as LaneLinear, LaneEmbedding as LaneEmbedding,
    LaneLayerNorm as LaneLayerNorm, Scale as Scale, LaneAttention as LaneAttention, lane_noise as lane_noise,
    LaneDropout as LaneDropout)
from .modules import (LARGE as LARGE, TOLERANCE as TOLERANCE, WIDER as WIDER, SAME as SAME, ATOMS as ATOMS,
    LaneModule as LaneModule, lane_module as lane_module, LaneForm as LaneForm, check_lanes as check_lanes,
    Ports as Ports, find_form as find_form, compare_with_copies as compare_with_copies, lane_form as lane_form,
    LayerSeen as LayerSeen, TrialRun as TrialRun, run_on_trial as run_on_trial, computed_again as computed_again,
    layers_of as layers_of, exchange_layers as exchange_layers, write_lane as write_lane)
from .parts import (AnyPart as AnyPart, Leaf as Leaf, Wrapped as Wrapped, inner_tensors as inner_tensors,
    pack_tree as pack_tree, unpack_tree as unpack_tree, portable_tree as portable_tree, revive_tree as revive_tree,
    has_lanes as has_lanes, same_layout as same_layout, blank_gradient as blank_gradient, is_blank as is_blank,
    ModulePart as ModulePart, OptimizerPart as OptimizerPart, forget_noted as forget_noted, StatePart as StatePart,
    tensors_in as tensors_in, ndarrays_in as ndarrays_in, weights_in as weights_in, as_stateful as as_stateful,
    as_part as as_part, RandomStreams as RandomStreams)
from .trees import (encode_tree as encode_tree, decode_tree as decode_tree, tree_to_bytes as tree_to_bytes,
    tree_from_bytes as tree_from_bytes, content_digest as content_digest, write_tree as write_tree,
    read_tree as read_tree, read_saved as read_saved)
from .workers import (T as T, R as R, Plan as Plan, BUDGET as BUDGET, plan as plan,
    default_workers as default_workers, use_threads as use_threads, Workers as Workers,
    hold_interrupts as hold_interrupts)
