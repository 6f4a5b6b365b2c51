from __future__ import annotations

from labkit.devices.ranks.rank_output import RankOutput


def stream(text, name="stdout"):
    return {"name": name, "text": text}


def test_lines_of_two_ranks_never_share_a_line(capsys):
    output = RankOutput()
    output.take(0, "stream", stream("ab"))
    output.take(1, "stream", stream("c\nd"))
    output.take(0, "stream", stream("\n"))
    output.end()
    assert capsys.readouterr().out == "[1] c\n[0] ab\n[1] d\n"


def test_standard_error_stays_apart_and_hidden_ranks_are_silent(capsys):
    output = RankOutput(show=[1])
    output.take(1, "stream", stream("warning\n", "stderr"))
    output.take(0, "stream", stream("hidden\n"))
    output.take(0, "execute_result", {"data": {"text/plain": "hidden"}})
    output.end()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "[1] warning\n")


def test_only_the_last_drawing_of_a_line_is_kept_and_memory_stays_small(capsys):
    output = RankOutput()
    for percent in range(0, 101, 5):
        output.take(0, "stream", stream(f"\r{percent}%", "stderr"))
        assert len(output._unfinished[0, "stderr"]) < 10
    output.take(0, "stream", stream("\ndone\r\n", "stderr"))
    output.end()
    assert capsys.readouterr().err == "[0] 100%\n[0] done\n"


def test_a_value_of_many_lines_has_the_rank_before_each(capsys):
    output = RankOutput()
    output.take(0, "execute_result", {"data": {"text/plain": "tensor([1,\n        2])"}})
    assert capsys.readouterr().out == "[0] tensor([1,\n[0]         2])\n"
