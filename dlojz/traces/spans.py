"""Spans of time, (begin, end): their union, their length and their overlap."""


def union(spans) -> list[tuple[float, float]]:
    """Return the same time in spans that do not overlap, in order."""
    found = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def of(events) -> list[tuple[float, float]]:
    """Return the union of the spans of some events."""
    return union((e.begin, e.end) for e in events)


def outermost(events) -> list:
    """Return the events that are not inside an earlier one of the same place."""
    kept, ends = [], {}
    for e in events:
        if e.end > ends.get(e.where, e.begin):
            kept.append(e)
            ends[e.where] = e.end
    return kept


def length(spans) -> float:
    """Return the length of a union."""
    return sum(end - begin for begin, end in spans)


def without(spans, cover) -> list[tuple[float, float]]:
    """Return the part of one union that another does not cover."""
    found, cover = [], iter(cover)
    hidden = next(cover, None)
    for begin, end in spans:
        while hidden and hidden[1] <= begin:
            hidden = next(cover, None)
        while hidden and hidden[0] < end:
            if hidden[0] > begin:
                found.append((begin, hidden[0]))
            begin = max(begin, hidden[1])
            if hidden[1] >= end:
                break
            hidden = next(cover, None)
        if begin < end:
            found.append((begin, end))
    return found


def common(spans, others) -> float:
    """Return the time for which two unions overlap."""
    return length(spans) - length(without(spans, others))
