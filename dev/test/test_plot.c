// test_plot.c: timeline, schedule and loss of dev/plot as a user runs them: pictures hold what
// they should, bad files are refused. With a folder as argument the pictures stay there to be
// looked at.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dev/test/check.h"
#include "dev/test/run_plots.h"

static Check c;

// Writes the trace SCHEDULE-MORE.json of 4 stages and 8 micro-batches.
static int simulate(const char *schedule, int v, double transfer, const char *dir,
                    const char *more) {
    double chunk = 1.0 / v;
    return run(
        schedule_main,
        "schedule --stages 4 --micros 8 --virtual %d --forward %g --backward %g --weight %g "
        "--transfer %g --trace %s/%s%s.json %s",
        v, chunk, chunk, chunk, transfer, dir, schedule, more, schedule);
}

static void test_timeline(const char *dir, const char *schedule, int v, const char *percent) {
    char slow[64], part[64];
    bool split = strncmp(schedule, "zb", 2) == 0;
    int made = simulate(schedule, v, 0, dir, "");
    int drawn =
        run(timeline_main, "timeline --out %s/%s.svg %s/%s.json", dir, schedule, dir, schedule);
    snprintf(part, sizeof part, "measured %s%% of", percent);
    char *text = read_picture(dir, schedule);
    check(&c, made == 0 && drawn == 0 && strstr(text, part), "timeline: %s has a bubble of %s%%",
          schedule, percent);
    check(&c, occurrences(text, ">7</text>") == (size_t)(split ? 12 : 8) * v,
          "timeline: %s shows micro-batch 7 in all its boxes", schedule);
    free(text);

    // Messages that take time: more idle, and after retiming the formula again
    made = simulate(schedule, v, 0.4, dir, "-slow");
    drawn = run(timeline_main, "timeline --title %s --out %s/%s-slow.svg %s/%s-slow.json",
                schedule, dir, schedule, dir, schedule);
    snprintf(slow, sizeof slow, "%s-slow", schedule);
    text = read_picture(dir, slow);
    bool slower = made == 0 && drawn == 0 && text[0] && !strstr(text, part) &&
                  strstr(text, ">send<");
    free(text);
    drawn = run(timeline_main, "timeline --retime --out %s/retimed.svg %s/%s-slow.json", dir, dir,
                schedule);
    snprintf(part, sizeof part, "retimed %s%% of", percent);
    text = read_picture(dir, "retimed");
    check(&c, slower && drawn == 0 && strstr(text, part),
          "timeline: %s with slow messages, and retimed", schedule);
    free(text);
}

// Two stages and one micro-batch. The second stage has the loss as well: F 2, F 2, loss 2, B 4, B
// 4 ms one after the other. In these 14 ms rank 0 works for 6 and rank 1 for 8: idle 14 of 14, on
// the busiest rank 6 of 8.
static void test_loss_is_work(const char *dir) {
    static const struct { const char *kind; int from, to, rank;
    } events[] = {{"forward", 0, 2, 0},
                  {"forward", 2, 4, 1},
                  {"loss", 4, 6, 1},
                  {"backward", 6, 10, 1},
                  {"backward", 10, 14, 0}};
    char json[2048] = "{\"traceEvents\":[";
    for (size_t i = 0; i < 5; i++) {
        snprintf(json + strlen(json), sizeof json - strlen(json),
                 "%s{\"name\":\"x\",\"ph\":\"X\",\"ts\":%d,\"dur\":%d,\"pid\":%d,\"tid\":0,"
                 "\"args\":{\"kind\":\"%s\",\"micro\":0,\"chunk\":0,\"step\":1}}",
                 i ? "," : "", 1000 * events[i].from, 1000 * (events[i].to - events[i].from),
                 events[i].rank, events[i].kind);
    }
    strcat(json, "]}\n");
    write_in(dir, "head.json", json);
    int drawn = run(timeline_main, "timeline --out %s/head.svg %s/head.json", dir, dir);
    char *text = read_picture(dir, "head");
    check(&c,
          drawn == 0 &&
              strstr(text, "measured 100.0% of compute time, 75.0% on the busiest rank, formula"),
          "timeline: the loss is work, and the busiest rank's bubble is its own");
    free(text);
}

// Draws a list, a file and a name, and checks the refusals. Spaces separate the arguments here,
// so that a list goes through a file.
static void test_schedule(const char *dir) {
    write_in(dir, "list.txt", "F0 F1 B0 W0 B1 W1\nF0 B0 F1 B1 W0 W1\n");
    int made = run(schedule_main, "schedule --list --trace %s/list.json %s/list.txt", dir, dir);
    int drawn = run(timeline_main, "timeline --out %s/list.svg %s/list.json", dir, dir);
    char *text = read_picture(dir, "list");
    check(
        &c,
        made == 0 && drawn == 0 && strstr(text, "measured 16.7% of") && strstr(text, ">weight<"),
        "schedule: a list from a file is drawn, with its weight steps");
    free(text);
    check(&c, run(schedule_main, "schedule --stages 3 --micros 5 zb-auto") == 0,
          "schedule: a name with sizes");
    check(&c, run(schedule_main, "schedule zb-auto") == 1,
          "schedule refuses: a name without sizes");
    check(&c, run(schedule_main, "schedule --stages 3 --micros 5 %s/list.txt", dir) == 1,
          "schedule refuses: a file for other sizes");
    write_in(dir, "list.txt", "F0 B0 F1 B1\nF0 F1 B0 B1\n");
    check(&c, run(schedule_main, "schedule %s/list.txt", dir) == 1,
          "schedule refuses: a list that hangs");
    write_in(dir, "list.txt", "F0 B0 F1 C1\n");
    check(&c, run(schedule_main, "schedule %s/list.txt", dir) == 1,
          "schedule refuses: a word that is no step");
    check(&c, run(schedule_main, "schedule %s/nowhere.txt", dir) == 1,
          "schedule refuses: no such file");
    check(&c,
          run(schedule_main, "schedule --stages 0 1f1b") == 2 &&
              run(schedule_main, "schedule") == 2,
          "schedule refuses: bad options");
}

static void test_bad_traces(const char *dir) {
    static const struct {
        const char *text, *name;
    } cases[] = {
        {"", "empty file"},
        {"{\"traceEvents\":[{", "truncated file"},
        {"{\"traceEvents\":{}}", "no array"},
        {"[]", "no events"},
        {"[{\"ph\":\"X\",\"ts\":0,\"dur\":1,\"pid\":0,\"args\":{\"kind\":\"forward\",\"micro\":0}"
         "}]",
         "no backward"},
        {"[{\"ph\":\"X\",\"ts\":0,\"dur\":-1,\"pid\":-7,\"args\":{\"kind\":\"backward\","
         "\"micro\":1e300}}]",
         "absurd numbers"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_in(dir, "bad.json", cases[i].text);
        check(&c, run(timeline_main, "timeline --out %s/bad.svg %s/bad.json", dir, dir) == 1,
              "timeline refuses: %s", cases[i].name);
    }
    check(&c, run(timeline_main, "timeline --step 7 --out %s/bad.svg %s/gpipe.json", dir, dir) == 1,
          "timeline refuses: no such step");
    check(
        &c,
        run(timeline_main, "timeline --pipeline 3 --out %s/bad.svg %s/gpipe.json", dir, dir) == 1,
        "timeline refuses: 4 ranks on 3 stages");
    check(
        &c,
        run(timeline_main, "timeline --retime --pipeline 2 --out %s/bad.svg %s/interleaved.json",
            dir, dir) <= 1,
        "timeline survives: a wrong number of stages");
    check(&c, run(timeline_main, "timeline %s/missing.json", dir) == 1,
          "timeline refuses: missing file");
    check(&c, run(timeline_main, "timeline --width 7 %s/gpipe.json", dir) == 2 &&
                  run(timeline_main, "timeline --costs 1,1 %s/gpipe.json", dir) == 2,
          "timeline refuses: bad option");
    int drawn = run(timeline_main, "timeline --costs 1,1,0.5 --out %s/bad.svg %s/zb-h1-slow.json",
                    dir, dir);
    char *text = read_picture(dir, "bad");
    check(&c, drawn == 0 && strstr(text, "retimed 22.5% of"), "timeline: zb-h1 with given costs");
    free(text);
    check(&c, run(schedule_main, "schedule --stages 4 --micros 6 interleaved") == 1,
          "schedule refuses: 6 micro-batches on 4 stages");
}

static void test_loss(const char *dir) {
    const char *path = in(dir, "log.jsonl");
    FILE *log = fopen(path, "wb");
    for (int step = 0; log && step < 200; step++) {
        fprintf(log,
                "{\"step\":%d,\"loss\":%.9g,\"grad_norm\":1,\"lr\":0.001,\"ms\":5,\"tokens_per_"
                "s\":1}\n",
                step, 1.5 + 4 * exp(-step / 30.0) + 0.1 * sin(step * 7.0));
        if (step % 50 == 49)
            fprintf(log, "{\"step\":%d,\"val_loss\":%.9g}\n", step + 1,
                    1.6 + 4 * exp(-step / 30.0));
    }
    if (log) fputs("{\"step\":200,\"lo", log), fclose(log);
    int drawn = run(loss_main, "loss --out %s/loss.svg %s again=%s", dir, path, path);
    char *text = read_picture(dir, "loss");
    check(&c,
          drawn == 0 && occurrences(text, "<circle") == 8 && occurrences(text, "<polyline") == 4 &&
              strstr(text, ">again: 1."),
          "loss: two runs, with the last line cut off");
    free(text);
    char printed[256];
    snprintf(printed, sizeof printed, "%s", in(dir, "log.txt"));
    run_output = printed;
    drawn = run(loss_main, "loss --text %s/log.jsonl", dir);
    run_output = "/dev/null";
    text = read_output(printed);
    size_t widest = 0;
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        if (strcspn(line, "\n") > widest) widest = strcspn(line, "\n");
    }
    check(&c, drawn == 0 && occurrences(text, "\n") == 11 && widest <= 60,
          "loss: %zu lines of text, %zu columns", occurrences(text, "\n"), widest);
    check(&c,
          strstr(text, "\n  5.50 |*\n") && strstr(text, "\n  1.4") &&
              occurrences(text, "o") == 4 + 4 && strstr(text, "step 0 ") &&
              strstr(text, " 200\n"),
          "loss: from the first loss down to the least, with four validations");
    free(text);
    check(&c, run(loss_main, "loss --text %s/log.jsonl %s/log.jsonl", dir, dir) == 1,
          "loss: text is of one log");
    check(&c, run(loss_main, "loss --smooth 1 --out %s/loss.svg %s/log.jsonl", dir, dir) == 0,
          "loss: not smoothed");
    write_in(dir, "one.jsonl", "{\"step\":0,\"loss\":3}\n");
    check(&c, run(loss_main, "loss --out %s/one.svg %s/one.jsonl", dir, dir) == 0,
          "loss: a single step");
    write_in(dir, "one.jsonl", "{\"step\":0,\"loss\":null}\nnonsense\n[]\n");
    check(&c, run(loss_main, "loss --out %s/one.svg %s/one.jsonl", dir, dir) == 1,
          "loss refuses: a log without losses");
    check(&c, run(loss_main, "loss %s/missing.jsonl", dir) == 1 && run(loss_main, "loss") == 2,
          "loss refuses: no file");
}

// Tests files that no trainer writes: endless axes, labels longer than their room, far too
// many rows.
static void test_hostile(const char *dir) {
    static const char event[] =
        "[{\"ph\":\"X\",\"ts\":%s,\"dur\":%s,\"pid\":%s,\"args\":{\"kind\":\"backward\","
        "\"micro\":%s,\"chunk\":%s,\"step\":0}}]";
    static const struct {
        const char *ts, *dur, *rank, *micro, *chunk;
    } events[] = {
        {"1", "0", "0", "0", "0"},        {"1e300", "1", "0", "0", "0"},
        {"1e14", "1e-9", "0", "0", "0"},  {"1", "1", "999999", "0", "0"},
        {"1", "1", "0", "999999", "0"},   {"1", "1", "0", "0", "999999"},
        {"-1e14", "9e14", "0", "0", "0"},
    };
    static const struct {
        const char *name, *text;
        int code;
    } logs[] = {
        {"steps that a double cannot tell apart",
         "{\"step\":9007199254740992,\"loss\":1}\n{\"step\":9007199254740994,\"loss\":2}\n", 1},
        {"a loss of 300 digits", "{\"step\":1,\"loss\":1e308}\n{\"step\":3,\"val_loss\":2}\n", 0},
        {"a loss of 15 digits",
         "{\"step\":1,\"loss\":9e14}\n{\"step\":999999999999999,\"val_loss\":-9e14}\n", 0},
    };
    char text[512];
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) {
        snprintf(text, sizeof text, event, events[i].ts, events[i].dur, events[i].rank,
                 events[i].micro, events[i].chunk);
        write_in(dir, "bad.json", text);
        int code = run(timeline_main, "timeline --out %s/bad.svg %s/bad.json", dir, dir);
        int retimed =
            run(timeline_main, "timeline --retime --out %s/bad.svg %s/bad.json", dir, dir);
        int want = i == 6 ? 0 : 1;
        check(&c, code == want && (retimed == 0 || retimed == 1),
              "timeline, %s %s of rank %s: exit codes %d, %d", events[i].ts, events[i].dur,
              events[i].rank, code, retimed);
    }
    for (size_t i = 0; i < sizeof logs / sizeof logs[0]; i++) {
        write_in(dir, "log.jsonl", logs[i].text);
        int code = run(loss_main, "loss --out %s/loss.svg %s/log.jsonl", dir, dir);
        check(&c, code == logs[i].code, "loss, %s: exit code %d", logs[i].name, code);
    }
}

int main(int argc, char **argv) {
    char dir[512];
    picture_folder(dir, "test_plot", argc, argv);
    test_timeline(dir, "gpipe", 1, "37.5");
    test_timeline(dir, "1f1b", 1, "37.5");
    test_timeline(dir, "interleaved", 2, "18.8");
    test_timeline(dir, "zb-h1", 1, "12.5");
    test_timeline(dir, "zb-auto", 1, "12.5");
    test_loss_is_work(dir);
    test_schedule(dir);
    test_bad_traces(dir);
    test_loss(dir);
    test_hostile(dir);
    if (argc < 2) remove_tree(dir);
    return check_summary(&c);
}
