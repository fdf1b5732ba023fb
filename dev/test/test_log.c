// test_log.c: the reports of a run: llmc/host/log.h (console line, JSON Lines, MFU),
// llmc/host/ramp.h and llmc/host/trace.h.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <signal.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "dev/test/check.h"
#include "dev/test/files.h"
#include "llmc/host/log.h"
#include "llmc/host/ramp.h"
#include "llmc/host/trace.h"

static char folder[] = "build/test_log.XXXXXX";  // of the files below
static const char *log_path, *trace_path;

// Lets no file grow beyond `bytes`, as on a full disk.
static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0) exit(1);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) exit(1);
}

static double number(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItem(object, key);
    return cJSON_IsNumber(item) ? item->valuedouble : -1;
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); }

static void test_learning_rate(Check *c) {
    check(c,
          near(learning_rate(LR_COSINE, 1, 4, 10, 1.0, 0.1), 0.25) &&
              near(learning_rate(LR_COSINE, 4, 4, 10, 1.0, 0.1), 1),
          "warm-up reaches lr in its last step");
    check(c,
          near(learning_rate(LR_COSINE, 7, 4, 10, 1.0, 0.1), 0.55) &&
              near(learning_rate(LR_LINEAR, 7, 4, 10, 1.0, 0.1), 0.55),
          "half way is the mean");
    check(c,
          near(learning_rate(LR_COSINE, 5, 4, 10, 1.0, 0.1),
               0.1 + 0.45 * (1 + cos(acos(-1.0) / 6))),
          "cosine");
    check(c, near(learning_rate(LR_LINEAR, 5, 4, 10, 1.0, 0.1), 0.1 + 0.9 * 5 / 6), "linear");
    static const LRSchedule schedules[] = {LR_COSINE, LR_LINEAR};
    bool ends = true, peaks = true;
    for (size_t i = 0; i < 2; i++) {
        for (size_t warmup = 0; warmup < 10; warmup++) {
            size_t peak = warmup ? warmup : 1;
            peaks = peaks && learning_rate(schedules[i], peak, warmup, 10, 2.0, 0.1) == 2.0 &&
                    learning_rate(schedules[i], peak + 1, warmup, 10, 2.0, 0.1) < 2.0;
            ends = ends && near(learning_rate(schedules[i], 10, warmup, 10, 2.0, 0.1), 0.2) &&
                   near(learning_rate(schedules[i], 11, warmup, 10, 2.0, 0.1), 0.2);
        }
    }
    check(c, peaks, "one step has lr: the last of the warm-up, or the first");
    check(c, ends, "the last step has lr * lr_final, as all behind it");
    check(c, learning_rate(LR_COSINE, 1, 0, 1, 1.0, 0.1) == 1.0, "the only step of a run has lr");
    bool constant = true;
    for (size_t step = 0; step < 12; step++)
        constant = constant && learning_rate(LR_COSINE, step + 1, 0, 10, 1e-3, 1.0) == 1e-3;
    check(c, constant, "without warm-up and with lr_final 1 it is constant");
    check(c, near(learning_rate(LR_COSINE, 5, 10, 5, 1.0, 0.1), 0.5),
          "a warm-up longer than the run");
}

// Tests the ramp of the batch. It grows as Megatron-LM's rule does, and ends at the
// global batch.
static void test_ramp(Check *c) {
    Ramp ramp = {0, 0, 0};
    Error err = {""};
    static const struct { const char *text; size_t G, samples;
    } RAMPS[] = {{"4,4,100", 16, 100},
                 {"8,8,97", 32, 97},
                 {"2,2,1000", 64, 1000},
                 {"16,0,50", 16, 50},
                 {"4,12,7", 16, 7}};
    bool parsed = true, rule = true, ends = true;
    for (size_t i = 0; i < sizeof RAMPS / sizeof RAMPS[0]; i++) {
        size_t G = RAMPS[i].G, sample = 0;
        parsed = parsed && ramp_parse(&ramp, RAMPS[i].text, G, 2, &err);
        for (size_t step = 0; step < 200 && parsed; step++) {
            size_t batch = ramp_batch(&ramp, G, sample),
                   grown = ramp.increment ? (G - ramp.start) / ramp.increment : 0;
            size_t want = sample >= ramp.samples || !grown ? G
                          : ramp.start + ramp.increment * (sample * grown / ramp.samples);
            rule = rule && batch == want && batch >= ramp.start && batch <= G;
            sample += batch;
        }
        ends = ends && sample > ramp.samples;
    }
    check(c, parsed, "ramps are read %s", err.text);
    check(
        c, rule,
        "--ramp: START + INCREMENT * floor(seen / (SAMPLES / increments)), then --global-batch");
    check(c, ends, "and ends");
    parsed = ramp_parse(&ramp, "100000,100000,900000000000000", 1000000000, 4, &err);
    check(c, parsed && ramp_batch(&ramp, 1000000000, 899999999999999) == 999900000 &&
                 ramp_batch(&ramp, 1000000000, 1) == 100000,
          "no overflow of numbers as large as can be given");
    Ramp none = {0, 0, 0};
    check(c, ramp_batch(&none, 24, 5) == 24, "without --ramp the batch is constant");
}

static void test_peaks(Check *c) {
    check(c,
          device_peak_flops("NVIDIA H100 80GB HBM3", true) == 989e12 &&
              device_peak_flops("NVIDIA H100 PCIe", true) == 756e12 &&
              device_peak_flops("NVIDIA A100-SXM4-80GB", true) == 312e12 &&
              device_peak_flops("NVIDIA H200", true) == 989e12,
          "peaks in bf16");
    check(c, device_peak_flops("NVIDIA A100-SXM4-40GB", false) == 19.5e12, "and in fp32");
    check(c,
          device_peak_flops("CPU (stand-in)", true) == 0 &&
              device_peak_flops("NVIDIA A10G", true) == 0 &&
              device_peak_flops("NVIDIA Z9000", true) == 0 &&
              device_peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", true) == 0,
          "\"unknown GPU\": a device that is not in the table, or a slice of one, has no peak");
}

static void log_steps(size_t done, size_t first, size_t last, Check *c) {
    Log log;
    Error err = {""};
    if (!log_open(&log, log_path, done, 10, 1e9, 0, &err)) {
        check(c, false, "%s", err.text);
        return;
    }
    for (size_t step = first; step <= last; step++) {
        StepReport report = {step, 1.0 / 3.0 + (double)done, 2.5, 1e-3, 4.0, 512};
        log_step(&log, &report);
        if (step % 2 == 0) log_validation(&log, step, 0.125);
    }
    check(c, log_close(&log, &err), "log of steps %zu to %zu written", first, last);
}

// The only line of the log.
static cJSON *logged(void) {
    char *text = read_file(log_path, NULL);
    cJSON *line = cJSON_Parse(text);
    free(text);
    return line;
}

static void test_log(Check *c) {
    log_steps(0, 1, 5, c);
    char *text = read_file(log_path, NULL);
    bool keys = true;
    size_t lines = 0, validations = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), lines++) {
        cJSON *object = cJSON_Parse(line);
        if (cJSON_GetObjectItem(object, "val_loss")) {
            validations++;
            keys = keys && number(object, "val_loss") == 0.125;
        } else {
            keys = keys && fabs(number(object, "loss") - 1.0 / 3) < 1e-9 &&
                   number(object, "grad_norm") == 2.5 && number(object, "lr") == 1e-3 &&
                   number(object, "ms") == 4 && number(object, "tokens_per_s") == 128000;
        }
        keys = keys && number(object, "step") >= 1;
        cJSON_Delete(object);
    }
    check(c, lines == 7 && validations == 2 && keys, "every line is JSON with its keys");
    free(text);

    // Killed in the middle of a line, then resumed from the checkpoint of step 3.
    FILE *file = fopen(log_path, "ab");
    fprintf(file, "{\"step\":6,\"lo");
    fclose(file);
    log_steps(3, 4, 10, c);
    text = read_file(log_path, NULL);
    size_t next = 1;
    bool once = true;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        cJSON *object = cJSON_Parse(line);
        if (cJSON_GetObjectItem(object, "loss")) {
            once = once && number(object, "step") == (double)next &&
                   (number(object, "loss") > 3) == (next > 3);
            next++;
        }
        cJSON_Delete(object);
    }
    check(c, next == 11 && once, "a resumed run continues its log: every step once, in order");
    free(text);

    Log log;
    Error err = {""};
    write_text(log_path, "dear diary\n");
    for (size_t done = 0; done < 4; done += 3) {
        check(c, !log_open(&log, log_path, done, 10, 1, 0, &err),
              "refused after %zu steps: a file that is no log -> %s", done, err.text);
        text = read_file(log_path, NULL);
        check(c, strcmp(text, "dear diary\n") == 0, "and left as it was");
        free(text);
    }
    unlink(log_path);
    check(c, !log_open(&log, "build/no/such/folder/log", 0, 10, 1, 0, &err), "refused: %s",
          err.text);
    StepReport report = {1, NAN, INFINITY, 1e-3, 4.0, 512};
    if (log_open(&log, log_path, 0, 10, 1, 0, &err)) {
        log_step(&log, &report);
        log_close(&log, &err);
    }
    cJSON *object = logged();
    check(c, cJSON_IsNull(cJSON_GetObjectItem(object, "loss")),
          "numbers that JSON cannot hold are null");
    cJSON_Delete(object);
    // 1e9 FLOPs in 4 ms are a quarter of 1e12 in a second.
    unlink(log_path);
    report.loss = report.grad_norm = 1.0;
    if (log_open(&log, log_path, 0, 10, 1e9 / 512, 1e12, &err))
        log_step(&log, &report), log_close(&log, &err);
    object = logged();
    check(c, number(object, "mfu") == 0.25, "MFU, where the peak is known");
    cJSON_Delete(object);
    unlink(log_path);
    limit_files(8);
    if (log_open(&log, log_path, 0, 10, 1, 0, &err)) {
        log_validation(&log, 1, 1.0);
        errno = 0;  // as something that succeeds in between may leave it
        check(c, !log_close(&log, &err) && strstr(err.text, "File too large"),
              "a full disk is reported: %s", err.text);
    }
    limit_files(RLIM_INFINITY);
    unlink(log_path);
}

// A log is written through a link, and into nothing but a regular file.
static void test_special_logs(Check *c) {
    const char *link = in(folder, "link"), *other = in(folder, "other");
    Error err = {""};
    Log log;
    struct stat info;
    unlink(log_path);
    log_steps(0, 1, 5, c);
    bool ok = symlink("log.jsonl", link) == 0 && log_open(&log, link, 3, 10, 1, 0, &err) &&
              log_close(&log, &err);
    char *text = read_file(log_path, NULL);
    check(c,
          ok && lstat(link, &info) == 0 && S_ISLNK(info.st_mode) && strstr(text, "\"step\":3,") &&
              !strstr(text, "\"step\":4,"),
          "a link stays one, and its target is cut to what was done");
    free(text);
    alarm(20);  // ends the program if opening waits for a reader
    ok = mkfifo(other, 0666) == 0 && !log_open(&log, other, 0, 10, 1, 0, &err);
    check(c, ok, "refused at once: a FIFO -> %s", err.text);
    TraceEvent event = trace_event("forward", 0, 0, 0, 0);
    const char *track = "compute";
    ok = !trace_write(other, &event, 1, &track, 1, &err);
    check(c, ok, "also for a trace -> %s", err.text);
    alarm(0);
    unlink(other);
    if (mknod(other, S_IFCHR | 0666, makedev(1, 3)) == 0) {
        ok = !log_open(&log, other, 3, 10, 1, 0, &err) && strstr(err.text, "not a regular file");
        check(c, ok && stat(other, &info) == 0 && S_ISCHR(info.st_mode),
              "refused: a device, which stays -> %s", err.text);
        unlink(other);
    }
    unlink(link);
}

// Tests that lines of --eval stay when a run resumes, which does not repeat them, and that they
// hide no line of training.
static void test_eval_lines(Check *c) {
    static const char *const text =
        "{\"step\":1,\"loss\":1}\n{\"step\":9,\"model\":\"a\",\"eval_rows\":7}\n{\"step\":2,"
        "\"loss\":2}\n"
        "{\"step\":3,\"loss\":3}\n{\"step\":3,\"model\":\"b\",\"eval_rows\":8}\n{\"step\":4,"
        "\"loss\":4}\n";
    static const char *const wanted =
        "{\"step\":1,\"loss\":1}\n{\"step\":9,\"model\":\"a\",\"eval_rows\":7}\n{\"step\":2,"
        "\"loss\":2}\n"
        "{\"step\":3,\"model\":\"b\",\"eval_rows\":8}\n{\"step\":3,\"model\":\"a "
        "\\\"b\\\\\\u0009\"}\n";
    Error err;
    Log log;
    unlink(log_path);
    write_text(log_path, text);
    bool ok = log_open(&log, log_path, 2, 10, 1, 0, &err);
    if (ok) {
        fprintf(log.json, LOG_START "3");
        log_text(log.json, "model", "a \"b\\\t");
        log_end_line(&log);
        ok = log_close(&log, &err);
    }
    char *now = read_file(log_path, NULL);
    check(c, ok && strcmp(now, wanted) == 0,
          "lines of --eval stay when a resumed run cuts its log");
    free(now);
    unlink(log_path);
}

// Tests that lines of an earlier run, and of another run that still writes, are kept. A
// torn end is removed.
static void test_kept_logs(Check *c) {
    static const char *const lines = "{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":2}\n";
    static const struct { const char *tail; size_t bytes; bool torn;
    } tails[] = {{"\0\0\0\0\0", 5, true},
                 {"{\"step\":3,\"lo\0\0\0", 15, true},
                 {"{\"st", 4, true},
                 {"text\0", 5, false}};
    const char *aside = in(folder, "log.jsonl.1"), *other = in(folder, "log.jsonl.2");
    Error err = {""};
    Log log;
    unlink(log_path), unlink(aside), unlink(other);
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        FILE *file = fopen(log_path, "wb");
        fputs(lines, file);
        fwrite(tails[i].tail, 1, tails[i].bytes, file);
        fclose(file);
        bool ok = log_open(&log, log_path, 2, 10, 1, 0, &err) == tails[i].torn;
        if (log.json) log_close(&log, &err);
        char *text = read_file(log_path, NULL);
        check(c,
              ok && strncmp(text, lines, strlen(lines)) == 0 &&
                  (!tails[i].torn || !text[strlen(lines)]),
              "a log with %zu more bytes is %s", tails[i].bytes,
              tails[i].torn ? "cut behind its lines" : "no log");
        free(text);
    }
    for (int run = 0; run < 2; run++) {
        write_text(log_path, lines);
        log_steps(0, 1, 1, c);
    }
    char *text = read_file(aside, NULL), *second = read_file(other, NULL);
    check(c, strcmp(text, lines) == 0 && strcmp(second, lines) == 0,
          "logs of earlier runs stay as %s and .2", aside);
    free(text), free(second);
    unlink(aside), unlink(other), unlink(log_path);
    pid_t child;
    int there[2], status;
    if (pipe(there) != 0) exit(1);
    child = fork();
    if (child == 0) {
        if (!log_open(&log, log_path, 0, 10, 1, 0, &err)) _exit(1);
        log_validation(&log, 1, 1.0);
        status = write(there[1], "x", 1) == 1;
        for (;;) pause();
    }
    char byte;
    bool refused = read(there[0], &byte, 1) == 1 && !log_open(&log, log_path, 0, 10, 1, 0, &err) &&
                   strstr(err.text, "is in use by another run, process") && !log.json;
    refused &= !log_open(&log, log_path, 1, 10, 1, 0, &err);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    text = read_file(log_path, NULL);
    check(c, refused && strcmp(text, "{\"step\":1,\"val_loss\":1}\n") == 0,
          "a log in use is refused -> %s", err.text);
    free(text);
    unlink(log_path);
    close(there[0]), close(there[1]);
}

static void test_trace(Check *c) {
    static const char *const streams[] = {"compute", "communication"};
    TraceList list;
    Error err = {""};
    memset(&list, 0, sizeof list);
    for (int i = 0; i < 3000; i++) {
        TraceEvent event =
            trace_event(i % 2 ? "forward" : "all-reduce", i / 1000, i % 2, i % 5 - 1, 0);
        event.start_us = 10.5 * i;
        event.duration_us = 3.25;
        event.step = i;
        trace_add(&list, &event);
    }
    bool written = trace_write(trace_path, list.events, list.count, streams, 2, &err);
    check(c, written, "trace written %s", err.text);
    char *text = read_file(trace_path, NULL);
    cJSON *root = cJSON_Parse(text), *events = cJSON_GetObjectItem(root, "traceEvents"), *event;
    int complete = 0, names = 0;
    bool good = true;
    cJSON_ArrayForEach(event, events) {
        const cJSON *args = cJSON_GetObjectItem(event, "args");
        const char *phase = cJSON_GetStringValue(cJSON_GetObjectItem(event, "ph"));
        if (phase && *phase == 'X') {
            int i = complete++;
            const char *kind = cJSON_GetStringValue(cJSON_GetObjectItem(args, "kind"));
            good = good && kind && strcmp(kind, i % 2 ? "forward" : "all-reduce") == 0 &&
                   number(event, "pid") == i / 1000 && number(event, "tid") == i % 2 &&
                   number(event, "ts") == 10.5 * i && number(event, "dur") == 3.25 &&
                   number(args, "step") == i && (i % 5 == 0 || number(args, "micro") == i % 5 - 1);
        } else if (phase && *phase == 'M') {
            names++;
        }
    }
    check(c, complete == 3000 && good, "a trace is JSON with every event as it was");
    check(c, names == 3 * 2 * 3, "and with names and places of 3 ranks of 2 streams");
    cJSON_Delete(root);
    free(text);
    check(c, trace_write(trace_path, NULL, 0, streams, 2, &err), "an empty trace");
    text = read_file(trace_path, NULL);
    root = cJSON_Parse(text);
    check(c, root != NULL, "is JSON too");
    cJSON_Delete(root);
    free(text);
    check(c, !trace_write("build/no/such/folder/t", NULL, 0, streams, 2, &err), "refused: %s",
          err.text);
    limit_files(1000);
    check(c, !trace_write(trace_path, list.events, list.count, streams, 2, &err), "a full disk: %s",
          err.text);
    limit_files(RLIM_INFINITY);
    free(list.events);
}

int main(void) {
    static Check c;
    if (!mkdtemp(folder)) return 1;
    log_path = in(folder, "log.jsonl"), trace_path = in(folder, "trace.json");
    test_learning_rate(&c);
    test_ramp(&c);
    test_peaks(&c);
    test_log(&c);
    test_trace(&c);
    test_eval_lines(&c);
    test_kept_logs(&c);
    test_special_logs(&c);
    remove_tree(folder);
    return check_summary(&c);
}
