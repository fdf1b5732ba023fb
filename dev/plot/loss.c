// loss.c: draws the losses of one or more --log files over steps, as an SVG. Training loss is a
// thin line as logged and a thick one smoothed, and validation loss has dots. With --text it
// prints one file's losses as lines of text.
//
//   loss [--title TEXT] [--smooth STEPS] [--width PIXELS] [--out FILE.svg] [LABEL=]LOG.jsonl ...
//   loss --text [--out FILE.svg] LOG.jsonl
#include <cjson/cJSON.h>
#include <stdbool.h>

#include "dev/plot/svg.h"
#include "dev/plot/tool.h"

typedef struct {
    double step, loss;
} Point;

typedef struct {
    Point *points;
    size_t count, capacity;
} Curve;

typedef struct {
    char label[128];
    Curve train, val;
} Run;

typedef struct {
    double x0, x1, y0, y1;            // data
    double left, right, top, bottom;  // pixels
} Axes;

enum { MAX_RUNS = 8 };
static const char *const colors[MAX_RUNS] = {
    "#2c5f9e", "#d9632f", "#1f7a5c", "#8a5ac2", "#b58a1c", "#c0437a", "#3b8ea5", "#5f6b76"};

static bool curve_add(Curve *curve, double step, double loss) {
    if (curve->count == curve->capacity) {
        size_t capacity = curve->capacity ? 2 * curve->capacity : 256;
        Point *larger = realloc(curve->points, capacity * sizeof(Point));
        if (!larger) return false;
        curve->points = larger;
        curve->capacity = capacity;
    }
    curve->points[curve->count++] = (Point){step, loss};
    return true;
}

// Returns a number of the line, or NAN if no trainer writes such a value: a picture could not
// show it.
static double finite_number(const cJSON *line, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    return cJSON_IsNumber(item) && fabs(item->valuedouble) < 1e15 ? item->valuedouble : NAN;
}

// Reads a log. argument: [LABEL=]PATH. Leaves out a line that is not JSON (the last one of a run
// that was killed).
static bool read_run(const char *argument, Run *run, Error *err) {
    const char *equals = strchr(argument, '='), *path = equals ? equals + 1 : argument;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (equals) snprintf(run->label, sizeof run->label, "%.*s", (int)(equals - argument), argument);
    else snprintf(run->label, sizeof run->label, "%.*s", (int)strcspn(name, "."), name);
    size_t bytes;
    char *text = file_read(path, SIZE_MAX, &bytes, err);
    if (!text) return false;
    bool room = true;
    for (char *line = text, *end; line && *line && room; line = end) {
        end = strchr(line, '\n');
        if (end) *end++ = 0;
        cJSON *json = cJSON_Parse(line);
        double step = finite_number(json, "step"), loss = finite_number(json, "loss"),
               val = finite_number(json, "val_loss");
        if (isfinite(step) && isfinite(loss)) room = room && curve_add(&run->train, step, loss);
        if (isfinite(step) && isfinite(val)) room = room && curve_add(&run->val, step, val);
        cJSON_Delete(json);
    }
    free(text);
    if (!room) return error_set(err, "out of memory");
    return run->train.count + run->val.count > 0 || error_set(err, "%s holds no losses", path);
}

static void extend(Axes *a, const Curve *curve) {
    for (size_t i = 0; i < curve->count; i++) {
        Point q = curve->points[i];
        a->x0 = fmin(a->x0, q.step), a->x1 = fmax(a->x1, q.step);
        a->y0 = fmin(a->y0, q.loss), a->y1 = fmax(a->y1, q.loss);
    }
}

static double place_x(const Axes *a, double step) {
    return a->left + (step - a->x0) / (a->x1 - a->x0) * (a->right - a->left);
}

static double place_y(const Axes *a, double loss) {
    return a->bottom - (loss - a->y0) / (a->y1 - a->y0) * (a->bottom - a->top);
}

// Returns how many points before one the mean over `smooth` points around it takes. It takes as
// many behind it as there are: the end of the curve is a mean, too.
static size_t reach_before(size_t i, size_t smooth) { return i < smooth / 2 ? i : smooth / 2; }

// Draws a curve. smooth: the mean of that many points around each one; 1 draws them as they are.
static void draw_curve(FILE *out, const Axes *a, const Curve *curve, const char *color,
                       double width, double opacity, size_t smooth) {
    fprintf(out,
            "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" stroke-opacity=\"%g\" "
            "stroke-linejoin=\"round\" points=\"",
            color, width, opacity);
    size_t first = 0, last = 0;  // of the window [first, last), whose sum is kept
    double sum = 0;
    for (size_t i = 0; i < curve->count; i++) {
        size_t reach = reach_before(i, smooth), end = i + reach + 1;
        if (end > curve->count) end = curve->count;
        for (; last < end; last++) sum += curve->points[last].loss;
        for (; first < i - reach; first++) sum -= curve->points[first].loss;
        double mean = sum / (double)(last - first);
        fprintf(out, "%.2f,%.2f ", place_x(a, curve->points[i].step), place_y(a, mean));
    }
    fprintf(out, "\"/>\n");
}

static void draw_axes(FILE *out, const Axes *a) {
    SvgAxis axis = svg_axis(a->x0, a->x1, 8);
    for (int i = 0; i < axis.count; i++) {
        double x = axis.first + i * axis.step;
        svg_line(out, place_x(a, x), a->top, place_x(a, x), a->bottom, SVG_GRID, 1);
        svg_text(out, place_x(a, x), a->bottom + 20, 12, 400, "middle", SVG_MUTED, "%.*f",
                 svg_axis_digits(axis.step), x);
    }
    axis = svg_axis(a->y0, a->y1, 7);
    for (int i = 0; i < axis.count; i++) {
        double y = axis.first + i * axis.step, at = place_y(a, y);
        svg_line(out, a->left, at, a->right, at, SVG_GRID, 1);
        svg_text(out, a->left - 10, at + 4, 12, 400, "end", SVG_MUTED, "%.*f",
                 svg_axis_digits(axis.step), y);
    }
    svg_line(out, a->left, a->bottom, a->right, a->bottom, SVG_MUTED, 1);
    svg_text(out, (a->left + a->right) / 2, a->bottom + 42, 13, 400, "middle", SVG_INK, "step");
}

static void draw(FILE *out, const Run *runs, int count, const char *title, double width,
                 size_t smooth) {
    double height = 0.5 * width + 70;
    Axes a = {INFINITY, -INFINITY, INFINITY, -INFINITY, 70, width - 30, 62, height - 60};
    for (int r = 0; r < count; r++) {
        extend(&a, &runs[r].train);
        extend(&a, &runs[r].val);
    }
    if (!(a.x1 > a.x0)) a.x0 -= 1, a.x1 += 1;
    double margin = 0.04 * (a.y1 - a.y0) + 1e-6 * fabs(a.y1) + 1e-12;
    a.y0 -= margin, a.y1 += margin;
    if (!title) title = "Loss";
    svg_begin(out, width, height, title);
    svg_text(out, a.left, 28, 17, 700, "start", SVG_INK, "%s", title);
    char bold[64] = "";
    if (smooth > 1) snprintf(bold, sizeof bold, " (bold: mean over %zu steps)", smooth);
    svg_text(out, a.left, 48, 13, 400, "start", SVG_MUTED,
             "nats per token; line: training%s, dots: validation", bold);
    draw_axes(out, &a);
    double y = a.top + 16, label_x = a.right;
    for (int r = 0; r < count; r++) {
        double w = svg_text_width(runs[r].label, 12.5) + 130;
        label_x = fmin(label_x, a.right - w);
    }
    for (int r = 0; r < count; r++) {
        const Run *run = &runs[r];
        draw_curve(out, &a, &run->train, colors[r], 1, smooth > 1 ? 0.3 : 1, 1);
        if (smooth > 1) draw_curve(out, &a, &run->train, colors[r], 2.2, 1, smooth);
        if (!run->train.count) draw_curve(out, &a, &run->val, colors[r], 1, 0.6, 1);
        for (size_t i = 0; i < run->val.count; i++) {
            Point q = run->val.points[i];
            fprintf(
                out,
                "<circle cx=\"%.2f\" cy=\"%.2f\" r=\"4\" fill=\"%s\" stroke=\"#ffffff\"/>\n",
                place_x(&a, q.step), place_y(&a, q.loss), colors[r]);
        }
    }
    for (int r = 0; r < count; r++, y += 20) {
        const Curve *train = &runs[r].train, *val = &runs[r].val;
        char text[256], last_train[32] = "", last_val[40] = "";
        if (train->count) {
            size_t back = reach_before(train->count - 1, smooth);
            double sum = 0;
            for (size_t i = train->count - 1 - back; i < train->count; i++)
                sum += train->points[i].loss;
            snprintf(last_train, sizeof last_train, ": %.3f", sum / (double)(back + 1));
        }
        if (val->count)
            snprintf(last_val, sizeof last_val, "%s val %.3f", train->count ? "," : ":",
                     val->points[val->count - 1].loss);
        snprintf(text, sizeof text, "%.127s%s%s", runs[r].label, last_train, last_val);
        svg_line(out, label_x, y - 4, label_x + 20, y - 4, colors[r], 3);
        svg_text(out, label_x + 28, y, 12.5, 400, "start", SVG_INK, "%s", text);
    }
    svg_end(out);
}

// ---- as text ---------------------------------------------------------------------------

enum { TEXT_ROWS = 8, TEXT_COLUMNS = 52 };

static int text_column(const Axes *a, double step) {
    return (int)fmin((step - a->x0) / (a->x1 - a->x0) * TEXT_COLUMNS, TEXT_COLUMNS - 1);
}

static int text_row(const Axes *a, double loss) {
    return (int)round((a->y1 - loss) / (a->y1 - a->y0) * (TEXT_ROWS - 1));
}

// Puts the mean of the training losses of each column, joined from one column to the next.
static void text_train(char rows[TEXT_ROWS][TEXT_COLUMNS + 1], const Axes *a, const Curve *train) {
    double sums[TEXT_COLUMNS] = {0};
    int counts[TEXT_COLUMNS] = {0}, previous = -1;
    if (train->count) {
        Point first = train->points[0];
        previous = text_row(a, first.loss);
        rows[previous][text_column(a, first.step)] = '*';
    }
    for (size_t i = 0; i < train->count; i++) {
        int column = text_column(a, train->points[i].step);
        sums[column] += train->points[i].loss;
        counts[column]++;
    }
    for (int column = 0; column < TEXT_COLUMNS; column++) {
        if (counts[column] == 0) continue;
        int row = text_row(a, sums[column] / counts[column]);
        for (int between = previous + 1; between < row; between++) rows[between][column] = '*';
        rows[row][column] = '*';
        previous = row;
    }
}

// Prints the curve in 8 lines of 60 columns, between its least and its largest loss.
static void print_text(FILE *out, const Run *run) {
    char rows[TEXT_ROWS][TEXT_COLUMNS + 1];
    Axes a = {INFINITY, -INFINITY, INFINITY, -INFINITY, 0, 0, 0, 0};
    extend(&a, &run->train);
    extend(&a, &run->val);
    if (!(a.x1 > a.x0)) a.x1 = a.x0 + 1;
    if (!(a.y1 > a.y0)) a.y1 = a.y0 + 1;
    for (int row = 0; row < TEXT_ROWS; row++) {
        memset(rows[row], ' ', TEXT_COLUMNS);
        rows[row][TEXT_COLUMNS] = '\0';
    }
    text_train(rows, &a, &run->train);
    for (size_t i = 0; i < run->val.count; i++) {
        Point q = run->val.points[i];
        rows[text_row(&a, q.loss)][text_column(&a, q.step)] = 'o';
    }
    fprintf(out, "loss in nats per token: * training, o validation\n");
    for (int row = 0; row < TEXT_ROWS; row++) {
        int length = TEXT_COLUMNS;
        while (length > 0 && rows[row][length - 1] == ' ') length--;
        double loss = a.y1 - (a.y1 - a.y0) * row / (TEXT_ROWS - 1);
        fprintf(out, fabs(loss) < 1000 ? "%6.2f |%.*s\n" : "%6.0e |%.*s\n", loss, length,
                rows[row]);
    }
    char first[32];
    int width = snprintf(first, sizeof first, "step %.0f", a.x0);
    fprintf(out, "       +----------------------------------------------------\n");
    fprintf(out, "        %s%*.0f\n", first, TEXT_COLUMNS - width, a.x1);
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: loss [--title TEXT] [--smooth STEPS] [--width PIXELS] [--out FILE.svg]\n"
        "            [LABEL=]LOG.jsonl ...\n"
        "       loss --text [--out FILE.svg] LOG.jsonl\n"
        "  --smooth STEPS  also draw the mean of that many steps (default: run / 50; 1: off)\n"
        "  --out FILE      where to write (default: standard output)\n"
        "  --text          print the curve of one log as lines of text\n";
    const char *title = NULL, *path = NULL;
    bool text = false;
    long smooth = 0, width = SVG_WIDTH;
    const PlotFlag flags[] = {{"title", PLOT_TEXT, &title, 0, 0},
                              {"smooth", PLOT_INTEGER, &smooth, 1, 1000000},
                              {"width", PLOT_INTEGER, &width, 300, 20000},
                              {"text", PLOT_SWITCH, &text, 0, 0},
                              {"out", PLOT_TEXT, &path, 0, 0}};
    tool_begin(argc, argv, usage);
    bool good = plot_flags("loss", argc, argv, flags, 5);
    int count = argc - optind;
    if (!good || count < 1) return fputs(usage, stderr), 2;
    if (text && count > 1) return tool_fail("loss", "--text draws one log");
    if (count > MAX_RUNS) return tool_fail("loss", "at most 8 logs fit into one picture");
    Run runs[MAX_RUNS] = {0};
    Error err;
    size_t longest = 0;
    for (int r = 0; r < count; r++) {
        if (!read_run(argv[optind + r], &runs[r], &err)) return tool_fail("loss", err.text);
        if (runs[r].train.count > longest) longest = runs[r].train.count;
    }
    bool ok = true;
    if (text) print_text(stdout, &runs[0]);
    if (!text || path) {
        FILE *out = svg_open(path, argv + optind, count, &err);
        if (!out) return tool_fail("loss", err.text);
        draw(out, runs, count, title, (double)width, smooth ? (size_t)smooth : longest / 50 + 1);
        ok = svg_close(out, path, &err);
    }
    if (ok && fflush(stdout) != 0) ok = error_set(&err, "cannot print: %s", strerror(errno));
    for (int r = 0; r < count; r++) {
        free(runs[r].train.points);
        free(runs[r].val.points);
    }
    return ok ? 0 : tool_fail("loss", err.text);
}
