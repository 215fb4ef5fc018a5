// Rows shared among threads, those of OpenMP that torch uses too.
#pragma once

#include <algorithm>
#include <cstdint>

namespace baton::kernels {

// Below so many elements a thread costs more to start than it saves.
constexpr int64_t kElementsAThread = 1 << 15;

// Calls `body(first, rows)` for parts of the rows.
template <typename Body>
void in_parts(int64_t rows, int64_t row_elements, int threads, const Body &body) {
    const int64_t parts = std::max<int64_t>(1, std::min({rows, rows * row_elements / kElementsAThread, int64_t{threads}}));
    if (parts == 1) return body(0, rows);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = rows * part / parts;
        body(first, rows * (part + 1) / parts - first);
    }
}

}  // namespace baton::kernels
