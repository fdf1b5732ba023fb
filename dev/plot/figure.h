// figure.h: building blocks of the drawings of doc/, beyond svg.h: boxes with text, arrows, and
// their colours.
#ifndef LLMC_FIGURE_H
#define LLMC_FIGURE_H

#include "dev/plot/svg.h"

// The same colours mean the same in all drawings.
#define FIGURE_WHOLE "#e3e8ee"      // every rank has it
#define FIGURE_SHARE "#bcd8f5"      // this rank's heads, hidden units or slice
#define FIGURE_TOKENS "#bfe8d6"     // this rank's tokens
#define FIGURE_COLLECTIVE "#e2d5f3" // communication
#define FIGURE_WAIT "#f9d5c3"       // what waits, or what is wrong
#define FIGURE_VIOLET "#6b3fa0"
#define FIGURE_ORANGE "#b8431a"

enum {
    FIGURE_TEXT = 14,
    FIGURE_SMALL = 13
}; // pixels; the drawings are at most 880 wide, which GitHub shows as they are

// Draws a box with one line of text in its middle; an empty text leaves it empty.
__attribute__((format(printf, 7, 8))) static inline void figure_box(FILE *out, double x, double y,
                                                                    double w, double h,
                                                                    const char *fill,
                                                                    const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    svg_rect(out, x, y, w, h, fill, SVG_MUTED);
    if (*text)
        svg_text(out, x + w / 2, y + h / 2 + 5, FIGURE_TEXT, 400, "middle", SVG_INK, "%s", text);
}

// Draws an arrow. Dashed ones are events, solid ones data.
static inline void figure_arrow(FILE *out, double x1, double y1, double x2, double y2,
                                const char *color, bool dashed) {
    double length = hypot(x2 - x1, y2 - y1), ux = (x2 - x1) / length, uy = (y2 - y1) / length;
    double bx = x2 - 9 * ux, by = y2 - 9 * uy; // where the head begins
    fprintf(out,
            "<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" stroke=\"%s\" "
            "stroke-width=\"1.6\"%s/>\n",
            x1, y1, bx, by, color, dashed ? " stroke-dasharray=\"5 3\"" : "");
    fprintf(out, "<polygon points=\"%.2f,%.2f %.2f,%.2f %.2f,%.2f\" fill=\"%s\"/>\n", x2, y2,
            bx - 4 * uy, by + 4 * ux, bx + 4 * uy, by - 4 * ux, color);
}

static inline void figure_begin(FILE *out, double width, double height, const char *title) {
    svg_begin(out, width, height, title);
    svg_text(out, 20, 26, 16, 700, "start", SVG_INK, "%s", title);
}

#define FIGURE_NOTE(out, x, y, ...) \
    svg_text(out, x, y, FIGURE_SMALL, 400, "start", SVG_MUTED, __VA_ARGS__)
#define FIGURE_LABEL(out, x, y, anchor, color, ...) \
    svg_text(out, x, y, FIGURE_SMALL, 400, anchor, color, __VA_ARGS__)

#endif
