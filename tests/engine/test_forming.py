"""Which clients share a group."""

from fl_lightning.engine.groups.forming import BOTH, COMPILED, LONGER, cost, form_groups, longest_alone


def groups(steps, least=2, size=4, kind=lambda k: None, lean=False, compiled=False):
    return form_groups(dict(enumerate(steps)), least, size, kind, lean, compiled)


def test_each_client_is_in_one_group_beside_those_of_as_many_steps():
    steps = [3, 9, 3, 7, 1, 9, 2, 5, 8]
    formed = groups(steps)
    assert sorted(k for group in formed for k in group) == list(range(9))
    assert formed == [[1, 5, 8], [3, 7, 0], [2, 6, 4]]
    assert max(map(len, groups(steps, size=8))) == 5


def test_kinds_are_kept_apart_and_too_few_train_by_themselves():
    formed = groups([4, 4, 4, 4, 4], least=3, kind=lambda k: k < 3)
    assert formed == [[0, 1, 2], [3], [4]]


def test_clients_of_far_more_steps_train_by_themselves_where_that_takes_less_time():
    steps = [900, 100, *[5] * 30]
    assert groups(steps, least=8, size=64, lean=True)[:2] == [[0], [1]]
    assert len(groups(steps, least=8, size=64)) == 1
    assert groups([10] * 20, least=8, size=64, lean=True) == [list(range(20))]
    # what is chosen takes the least of all choices
    named = dict(enumerate(steps))
    order = sorted(named, key=lambda k: (-named[k], k))
    taken = [sum(named[k] for k in order[:n]) + cost(order[n:], named) for n in range(len(order) - 1)]
    assert taken.index(min(taken)) == longest_alone(order, named)


def test_the_only_group_is_cut_in_two_where_two_workers_gain_much_and_one_loses_little():
    uneven = [*[90] * 10, *range(70, 6, -1)]
    named = dict(enumerate(uneven))
    given = {"least": 8, "size": 128, "lean": True}

    def costs(parts):
        return [cost(part, named, COMPILED) for part in parts]

    first, second = cut = groups(uneven, **given, compiled=True)
    assert first + second == list(named)
    whole = cost(list(named), named, COMPILED)
    assert max(costs(cut)) <= LONGER * whole
    assert sum(costs(cut)) <= BOTH * whole
    # no other cut has a shorter longest part
    others = (list(named)[:place] for place in range(8, len(uneven) - 7))
    assert max(costs(cut)) == min(max(costs([part, list(named)[len(part) :]])) for part in others)
    # the most even cut may cost too much in all where another does not
    assert list(map(len, groups([10] * 20 + [6] * 25, **given, compiled=True))) == [20, 25]
    # programs that are not compiled take longer; so do more of them for few clients
    assert groups(uneven, **given) == [list(named)]
    assert groups([10] * 20, **given, compiled=True) == [list(range(20))]
    # several groups keep several workers busy as they are
    assert list(map(len, groups([10] * 200, **given, compiled=True))) == [100, 100]
    assert len(groups(uneven, least=8, size=128, compiled=True)) == 1
