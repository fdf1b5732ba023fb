// experts.c: draws how the tokens of a training run fell on the experts, from the --log of
// train_moe. For each layer it draws the share of the choices that each expert got (a line
// each; dashed: equal shares). A dotted line is the share that was dropped.
//
//   experts [--title TEXT] [--out FILE.svg] LOG.jsonl
#include <cjson/cJSON.h>
#include <stdbool.h>

#include "dev/plot/svg.h"
#include "dev/plot/tool.h"

enum {
    MAX_EXPERTS = 128,
    MAX_LAYERS = 8,
    POINTS = 80
};  // layers: the first ones are drawn; points of a line

typedef struct {
    double step, dropped;  // dropped: share of the choices
    double share[MAX_EXPERTS];
} Row;

typedef struct {
    Row *rows;
    size_t count, capacity, experts;
} Layer;

static bool layer_add(Layer *layer, const cJSON *line, double step) {
    const cJSON *tokens = cJSON_GetObjectItemCaseSensitive(line, "tokens"), *token;
    const cJSON *dropped = cJSON_GetObjectItemCaseSensitive(line, "dropped");
    double sum = 0;
    size_t n = 0;
    if (layer->count == layer->capacity) {
        layer->capacity = layer->capacity ? 2 * layer->capacity : 256;
        Row *larger = realloc(layer->rows, layer->capacity * sizeof(Row));
        if (!larger) return false;
        layer->rows = larger;
    }
    Row *row = &layer->rows[layer->count];
    memset(row, 0, sizeof *row);
    row->step = step;
    cJSON_ArrayForEach(token, tokens) {
        if (n < MAX_EXPERTS && cJSON_IsNumber(token) && token->valuedouble >= 0)
            row->share[n++] = token->valuedouble;
    }
    for (size_t e = 0; e < n; e++) sum += row->share[e];
    if (n == 0 || !(sum > 0) || sum > 1e15 || (layer->count && n != layer->experts))
        return true;  // no such line
    for (size_t e = 0; e < n; e++) row->share[e] /= sum;
    row->dropped = cJSON_IsNumber(dropped) ? fmax(0, fmin(1, dropped->valuedouble / sum)) : 0;
    layer->experts = n;
    layer->count++;
    return true;
}

// Makes rows the means of neighbouring ones, POINTS at most.
static void layer_thin(Layer *layer) {
    size_t of = (layer->count + POINTS - 1) / POINTS, n = 0;
    for (size_t first = 0; first < layer->count; first += of, n++) {
        size_t end = first + of < layer->count ? first + of : layer->count;
        Row mean = {0};
        for (size_t i = first; i < end; i++) {
            mean.step += layer->rows[i].step / (double)(end - first);
            mean.dropped += layer->rows[i].dropped / (double)(end - first);
            for (size_t e = 0; e < layer->experts; e++)
                mean.share[e] += layer->rows[i].share[e] / (double)(end - first);
        }
        layer->rows[n] = mean;
    }
    layer->count = n;
}

// Returns how many of the first layers the log has; 0 with an error message.
static size_t read_log(const char *path, Layer layers[MAX_LAYERS], Error *err) {
    size_t bytes, count = 0;
    char *text = file_read(path, SIZE_MAX, &bytes, err);
    if (!text) return 0;
    for (char *line = text, *end; line && *line; line = end) {
        end = strchr(line, '\n');
        if (end) *end++ = 0;
        cJSON *json = cJSON_Parse(line);
        const cJSON *step = cJSON_GetObjectItemCaseSensitive(json, "step");
        const cJSON *number = cJSON_GetObjectItemCaseSensitive(json, "layer");
        double layer = cJSON_IsNumber(number) ? number->valuedouble : -1;
        bool drawn = cJSON_IsNumber(step) && fabs(step->valuedouble) < 1e15 && layer >= 0 &&
                     layer < MAX_LAYERS;
        if (drawn && !layer_add(&layers[(size_t)layer], json, step->valuedouble))
            error_set(err, "out of memory");
        cJSON_Delete(json);
    }
    free(text);
    while (count < MAX_LAYERS && layers[count].count > 1) layer_thin(&layers[count++]);
    if (!count) error_set(err, "%s has no lines of experts: train_moe --log writes them", path);
    return count;
}

// Draws a line through the shares of one expert, or a dotted one through the share that was
// dropped (expert < 0).
static void draw_share(FILE *out, const Layer *layer, int expert, double x, double y, double w,
                       double h, double top, const char *color) {
    const Row *first = &layer->rows[0], *last = &layer->rows[layer->count - 1];
    fprintf(out,
            "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"%s "
            "stroke-linejoin=\"round\" points=\"",
            color, expert < 0 ? " stroke-dasharray=\"1.5,3\"" : "");
    for (const Row *row = first; row <= last; row++) {
        double value = expert < 0 ? row->dropped : row->share[expert];
        fprintf(out, "%.2f,%.2f ", x + w * (row->step - first->step) / (last->step - first->step),
                y + h * (1 - value / top));
    }
    fprintf(out, "\"/>\n");
}

// Up to 8 experts have a colour each, more a scale of colours.
static const char *expert_color(size_t expert, size_t experts, char out[8]) {
    static const char *const colors[] = {"#2c5f9e", "#d9632f", "#2a9d8f", "#8a5ac2",
                                         "#e3a33b", "#c2407a", "#7d9a2e", "#5b4636"};
    if (experts <= sizeof colors / sizeof *colors) return colors[expert];
    return svg_mix(0x2c5f9e, 0xd9632f, (double)expert / (double)(experts - 1), out);
}

// Names the colours: of all experts, or of the first and the last.
static void draw_names(FILE *out, size_t experts, double x, double y) {
    char color[8], name[32];
    for (size_t e = 0; e < experts; e += experts <= 8 ? 1 : experts - 1) {
        snprintf(name, sizeof name, "expert %zu", e);
        svg_line(out, x, y - 4, x + 20, y - 4, expert_color(e, experts, color), 3);
        svg_text(out, x + 26, y, SVG_SMALL, 400, "start", SVG_INK, "%s", name);
        x += 46 + svg_text_width(name, SVG_SMALL);
    }
}

static void draw(FILE *out, const Layer *layers, size_t count, const char *title) {
    const double width = SVG_WIDTH, left = 64, w = width - left - 20, h = 130, gap = 42;
    const double head = 98;
    if (!title) title = "Tokens of each expert";
    svg_begin(out, width, head + (double)count * (h + gap) + 20, title);
    svg_text(out, left, 28, 17, 700, "start", SVG_INK, "%s", title);
    svg_text(out, left, 48, 13, 400, "start", SVG_MUTED,
             "share of the choices that fell on each expert; dashed: equal shares; dotted: share "
             "dropped");
    draw_names(out, layers[0].experts, left, 72);
    for (size_t l = 0; l < count; l++) {
        const Layer *layer = &layers[l];
        double y = head + (double)l * (h + gap), top = 0;
        for (size_t i = 0; i < layer->count; i++) {
            for (size_t e = 0; e < layer->experts; e++) top = fmax(top, layer->rows[i].share[e]);
            top = fmax(top, layer->rows[i].dropped);
        }
        SvgAxis axis = svg_axis(0, top, 3);
        for (int i = 0; i < axis.count; i++) {
            double at = y + h * (1 - (axis.first + i * axis.step) / top);
            svg_line(out, left, at, left + w, at, SVG_GRID, 1);
            svg_text(out, left - 10, at + 4, SVG_SMALL, 400, "end", SVG_MUTED, "%.0f%%",
                     100 * (axis.first + i * axis.step));
        }
        draw_share(out, layer, -1, left, y, w, h, top, SVG_MUTED);
        for (size_t e = 0; e < layer->experts; e++) {
            char color[8];
            draw_share(out, layer, (int)e, left, y, w, h, top,
                       expert_color(e, layer->experts, color));
        }
        double fair = y + h * (1 - 1 / (double)layer->experts / top);
        fprintf(out,
                "<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" stroke=\"%s\" "
                "stroke-dasharray=\"5,4\"/>\n",
                left, fair, left + w, fair, SVG_INK);
        svg_text(out, left, y - 5, 12.5, 700, "start", SVG_INK, "layer %zu", l);
        svg_text(out, left, y + h + 18, 12, 400, "start", SVG_MUTED, "step %.0f",
                 layer->rows[0].step);
        svg_text(out, left + w, y + h + 18, 12, 400, "end", SVG_MUTED, "step %.0f",
                 layer->rows[layer->count - 1].step);
    }
    svg_end(out);
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: experts [--title TEXT] [--out FILE.svg] LOG.jsonl\n";
    const char *title = NULL, *path = NULL;
    const PlotFlag flags[] = {{"title", PLOT_TEXT, &title, 0, 0}, {"out", PLOT_TEXT, &path, 0, 0}};
    static Layer layers[MAX_LAYERS];
    Error err;
    tool_begin(argc, argv, usage);
    if (!plot_flags("experts", argc, argv, flags, 2) || argc - optind != 1)
        return fputs(usage, stderr), 2;
    size_t count = read_log(argv[optind], layers, &err);
    if (!count) return tool_fail("experts", err.text);
    FILE *out = svg_open(path, argv + optind, 1, &err);
    if (!out) return tool_fail("experts", err.text);
    draw(out, layers, count, title);
    bool ok = svg_close(out, path, &err);
    for (size_t l = 0; l < MAX_LAYERS; l++) free(layers[l].rows);
    return ok ? 0 : tool_fail("experts", err.text);
}
