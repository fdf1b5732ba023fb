// simulate.c: runs a pipeline schedule in virtual time, without a model, and writes the trace that a trainer
// would write.
//
//   simulate SCHEDULE p m v FORWARD BACKWARD TRANSFER TRACE.json      (times in milliseconds, of one chunk; the halves
//                                                                     of a backward as INPUT+WEIGHT, else equal)
//   simulate interleaved 4 8 2 1 2 0.2 trace.json && timeline --out timeline.svg trace.json
#include "dev/plot/pipeline_run.h"
#include "dev/plot/tool.h"

// A whole argument as a number from 0 to limit, or -1.
static double number(const char *text, double limit) {
    char *end;
    double x = strtod(text, &end);
    return *text && !*end && x >= 0 && x <= limit ? x : -1;
}

// "2", two equal halves, or "1.2+0.8", into halves[2].
static bool backward_halves(const char *text, double *halves) {
    const char *plus = strchr(text, '+');
    char first[64];
    snprintf(first, sizeof first, "%.*s", plus ? (int)(plus - text) : (int)strlen(text), text);
    halves[0] = number(first, 1e6);
    if (!plus) halves[0] /= 2;
    halves[1] = plus ? number(plus + 1, 1e6) : halves[0];
    return halves[0] >= 0 && halves[1] >= 0;
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: simulate gpipe|1f1b|interleaved|zb-h1|zb-auto P M V FORWARD BACKWARD TRANSFER "
                                "TRACE.json\n";
    tool_begin(argc, argv, usage);
    if (argc != 9) return fputs(usage, stderr), 2;
    int schedule = 0;
    while (schedule < SCHEDULE_COUNT && strcmp(argv[1], pipeline_schedule_name((Schedule)schedule)) != 0) schedule++;
    if (schedule == SCHEDULE_COUNT)
        return tool_fail("simulate", "the schedule must be gpipe, 1f1b, interleaved, zb-h1 or zb-auto");
    int p = (int)number(argv[2], 1024), m = (int)number(argv[3], 65536), v = (int)number(argv[4], 1024);
    PipelineTimes times = {{number(argv[5], 1e6), 0, 0}, number(argv[7], 1e6), NULL};
    Error err;
    if (times.step[0] < 0 || times.transfer < 0 || !backward_halves(argv[6], &times.step[STEP_BACKWARD]))
        return tool_fail("simulate", "times must be numbers from 0 to 1000000");
    if (!pipeline_check((Schedule)schedule, p, m, v, &err)) return tool_fail("simulate", err.text);
    PipelineLists lists = zero_bubble_make((Schedule)schedule, p, m, v, &times, 2 * (size_t)p);
    PipelineRun run;
    bool ok = list_run(&run, &lists, PIPELINE_BUFFERS, &times, &err) &&
              list_run_write(&run, &lists, times.transfer, argv[8], &err);
    list_run_free(&run, &lists);
    pipeline_lists_free(&lists);
    return ok ? 0 : tool_fail("simulate", err.text);
}
