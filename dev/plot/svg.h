// svg.h: the few things that the plots share: SVG shapes, colours, round axis steps.
#ifndef LLMC_SVG_H
#define LLMC_SVG_H

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/file.h"

#define SVG_INK "#1f2933"
#define SVG_MUTED "#66727f"
#define SVG_GRID "#e3e8ee"

// A page of GitHub shows a wider picture in 830 pixels: of 900, the smallest text has 11 there.
enum { SVG_WIDTH = 900, SVG_SMALL = 12 };

// True when the whole text is an integer from lowest to highest.
static inline bool plot_integer(const char *text, long lowest, long highest, long *value) {
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return *text && !*end && errno == 0 && *value >= lowest && *value <= highest;
}

// True if the whole text is `count` numbers from 0 to 1000000, with commas between them.
static inline bool plot_numbers(const char *text, long count, double *values) {
    char *end;
    for (long i = 0; i < count; i++, text = end + 1) {
        values[i] = strtod(text, &end);
        if (end == text || !(values[i] >= 0 && values[i] <= 1e6) ||
            *end != (i + 1 < count ? ',' : 0))
            return false;
    }
    return true;
}

// A flag of a program, and the place of its value. The value is a bool that the flag sets, a text,
// a long from lowest to highest, or `lowest` doubles.
typedef enum { PLOT_SWITCH, PLOT_TEXT, PLOT_INTEGER, PLOT_NUMBERS } PlotKind;
typedef struct {
    const char *name;
    PlotKind kind;
    void *value;
    long lowest, highest;
} PlotFlag;

// Reads the flags; optind is then the first other word. Returns false after an error message on
// what is wrong.
static inline bool plot_flags(const char *program, int argc, char **argv, const PlotFlag *flags,
                              int count) {
    struct option options[16];
    memset(options, 0, sizeof options);
    for (int i = 0; i < count; i++) {
        options[i].name = flags[i].name;
        options[i].has_arg = flags[i].kind == PLOT_SWITCH ? no_argument : required_argument;
        options[i].val = 256 + i;
    }
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c < 256) return false;  // it has said so itself
        const PlotFlag *f = &flags[c - 256];
        bool good = true;
        if (f->kind == PLOT_SWITCH) *(bool *)f->value = true;
        else if (f->kind == PLOT_TEXT) *(const char **)f->value = optarg;
        else if (f->kind == PLOT_INTEGER)
            good = plot_integer(optarg, f->lowest, f->highest, (long *)f->value);
        else good = plot_numbers(optarg, f->lowest, (double *)f->value);
        if (good) continue;
        fprintf(stderr, "%s: --%s cannot be '%s'\n", program, f->name, optarg);
        return false;
    }
    return true;
}

// True if two names are of one file.
static inline bool same_file_on_disk(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Opens the file of a picture, or stdout if there is no path. Returns NULL with an error message if
// it cannot be written, or is one of the inputs, FILE or NAME=FILE.
static inline FILE *svg_open(const char *path, char *const *inputs, int count, Error *err) {
    for (int i = 0; path && i < count; i++) {
        const char *named = strchr(inputs[i], '=');
        if (!same_file_on_disk(path, inputs[i]) && !(named && same_file_on_disk(path, named + 1)))
            continue;
        error_set(err, "the picture would overwrite %s, which it is made of", path);
        return NULL;
    }
    FILE *out = path ? fopen(path, "wb") : stdout;
    if (!out) error_set(err, "cannot write %s: %s", path, strerror(errno));
    return out;
}

// Closes the file of a picture. Returns false with an error message if it could not be written.
static inline bool svg_close(FILE *out, const char *path, Error *err) {
    bool failed = ferror(out) | (out == stdout ? fflush(out) != 0 : fclose(out) != 0);
    return !failed ||
           error_set(err, "cannot write %s: %s", path ? path : "the picture", strerror(errno));
}

// Returns the bytes of the UTF-8 character that text begins with, or 0: XML takes no others.
static inline int svg_character(const char *text) {
    const unsigned char *c = (const unsigned char *)text;
    int more = c[0] < 0x80                   ? 0
               : c[0] >= 0xc2 && c[0] < 0xe0 ? 1
               : c[0] >= 0xe0 && c[0] < 0xf0 ? 2
                                             : 3;
    unsigned code = more ? c[0] & (0x3fu >> more) : c[0];
    if (more == 3 && (c[0] < 0xf0 || c[0] > 0xf4)) return 0;
    for (int i = 1; i <= more; i++) {
        if ((c[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (c[i] & 0x3f);
    }
    bool long_form = (more == 2 && code < 0x800) ||
                     (more == 3 && (code < 0x10000 || code > 0x10ffff));
    return code < 0x20 || long_form || (code >= 0xd800 && code < 0xe000) ||
                   (code & 0xfffe) == 0xfffe
               ? 0
               : more + 1;
}

// Writes text as XML takes it.
static inline void svg_escaped(FILE *out, const char *text) {
    int whole = 0;  // bytes left of a character
    for (const char *c = text; *c; c++) {
        if (*c == '<') fputs("&lt;", out);
        else if (*c == '>') fputs("&gt;", out);
        else if (*c == '&') fputs("&amp;", out);
        else if (svg_character(c)) fputc(*c, out), whole = svg_character(c) - 1;
        else if (whole > 0) fputc(*c, out), whole--;
        else if ((unsigned char)*c >= 0x80) fputc('?', out);
    }
}

// Begins a picture. title: its name for a browser and a screen reader.
static inline void svg_begin(FILE *out, double width, double height, const char *title) {
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 "
            "%g %g\" "
            "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n<title>",
            width, height, width, height);
    svg_escaped(out, title);
    fputs("</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n", out);
}

static inline void svg_end(FILE *out) { fprintf(out, "</svg>\n"); }

// Draws a rectangle. stroke: a colour or NULL.
static inline void svg_rect(FILE *out, double x, double y, double w, double h, const char *fill,
                            const char *stroke) {
    fprintf(out, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"", x, y,
            w, h, fill);
    if (stroke) fprintf(out, " stroke=\"%s\" stroke-width=\"0.75\"", stroke);
    fprintf(out, "/>\n");
}

static inline void svg_line(FILE *out, double x1, double y1, double x2, double y2,
                            const char *stroke, double width) {
    fprintf(out,
            "<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" stroke=\"%s\" "
            "stroke-width=\"%g\"/>\n",
            x1, y1, x2, y2, stroke, width);
}

// Writes a text. anchor: "start", "middle" or "end"; weight 400 or 700. y is the baseline.
__attribute__((format(printf, 8, 9))) static inline void svg_text(FILE *out, double x, double y,
                                                                  double size, int weight,
                                                                  const char *anchor,
                                                                  const char *fill,
                                                                  const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(out,
            "<text x=\"%.2f\" y=\"%.2f\" font-size=\"%.1f\" font-weight=\"%d\" "
            "text-anchor=\"%s\" fill=\"%s\">",
            x, y, size, weight, anchor, fill);
    svg_escaped(out, text);
    fputs("</text>\n", out);
}

// Returns the width in pixels that a text of this size takes, roughly.
static inline double svg_text_width(const char *text, double size) {
    return 0.56 * size * (double)strlen(text);
}

// Writes the colour between a and b (0xRRGGBB) as #rrggbb into out[8].
static inline const char *svg_mix(unsigned a, unsigned b, double t, char out[8]) {
    unsigned mixed = 0;
    for (int shift = 0; shift <= 16; shift += 8) {
        double from = (a >> shift) & 255, to = (b >> shift) & 255;
        mixed |= (unsigned)lround(from + (to - from) * t) << shift;
    }
    snprintf(out, 8, "#%06x", mixed & 0xffffffu);
    return out;
}

// Returns a step of 1, 2 or 5 times a power of ten that cuts range into about `parts`.
static inline double svg_axis_step(double range, int parts) {
    double raw = range / parts, power = pow(10, floor(log10(raw))), lead = raw / power;
    return power * (lead <= 1.001 ? 1 : lead <= 2.001 ? 2 : lead <= 5.001 ? 5 : 10);
}

// The marks first, first + step, ... of an axis from..to: at most 100, whatever the numbers are.
typedef struct {
    double first, step;
    int count;
} SvgAxis;

static inline SvgAxis svg_axis(double from, double to, int parts) {
    SvgAxis axis = {from, 1, 0};
    double step = svg_axis_step(to - from, parts);
    if (!isfinite(from) || !isfinite(to) || !(step > 0) || !isfinite(step)) return axis;
    axis.step = step;
    axis.first = ceil(from / step) * step;
    // The last one may pass the end by a rounding error.
    while (axis.count < 100 && axis.first + axis.count * step <= to + 1e-4 * step) axis.count++;
    return axis;
}

// Digits behind the point that values on this axis need.
static inline int svg_axis_digits(double step) {
    int digits = (int)-floor(log10(step) + 1e-9);
    return digits < 0 ? 0 : digits;
}

#endif
