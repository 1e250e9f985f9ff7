"Lets nbval run notebooks that nbdev has cleaned."
from scripts.notebooks import NOT_RUN, TRAINED, mask


def pytest_collection_modifyitems(config, items):
    "Leave out cells that are not run; mask figures of trainings, give back counts that cleaning took, heed a last `;`."
    cells = [item for item in items if getattr(item, "cell", None) is not None]
    for number, item in enumerate(cells, 1):
        # nbval takes a cell with outputs but no count as never run
        if item.cell.execution_count is None: item.cell.execution_count = number
        # a training's last digits are those of a processor: its page asserts what it claims of them
        if TRAINED in item.cell.metadata.get("tags", ()): item.sanitize = lambda x: mask(x) if isinstance(x, str) else x
        # it runs cells outside of history, where IPython does not see that a `;` asks for silence
        if item.cell.source.rstrip().endswith(";"): item.cell.source += "\nNone"
    left_out = [item for item in cells if NOT_RUN.search(item.cell.source)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
