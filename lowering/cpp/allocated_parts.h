// Attention of one query token over a part of the pages of a head, and over its exact tokens. Needs tokens.h and, with the
// macros of each side, allocated_scores.h in namespace keys and allocated_values.h in namespace values.

namespace {

constexpr int PAGES_AT_ONCE = 32;  // pages at a time

struct Part : RunningSoftmax {
    values::Total total;
    alignas(Floats) float scores[QUERIES * PAGES_AT_ONCE * PAGE];

    using RunningSoftmax::RunningSoftmax;

    template <typename Values, typename Layout, typename Score>
    void add_pages(
        const Values& own, const Layout& layout, int64_t begin, int64_t end, const float* table, Score score
    ) {
        constexpr int APART = PAGES_AT_ONCE * PAGE;
        for (int64_t n = begin, stop; n < end; n = stop) {
            stop = n + 1;
            if (hides_page(n)) continue;
            while (stop < std::min(n + PAGES_AT_ONCE, end) && !hides_page(stop)) stop++;
            score(n, stop, scores, APART);
            hide(SINKS + n * PAGE, (stop - n) * PAGE, scores, APART);
            weigh((stop - n) * PAGE, scores, APART, [&](int r, float rescale) { total.scale(r, rescale); });
            total.add_pages(own.pages, layout, own.room, n, stop, table, scores, APART);
        }
    }

    template <typename Context>
    void add_exact_tokens(const Context& exact, int64_t packed, int64_t all) {
        const int64_t first = SINKS + packed * PAGE;
        add_all_exact(exact, first, all, scores, PAGE, [&](int r, float rescale) { total.scale(r, rescale); });
    }
};

// The result of a part. Parts themselves are on the stack, because the allocator would return and fetch their memory at
// each call.
struct PartResult {
    float out[QUERIES * HEAD], peak[QUERIES], sum[QUERIES];
    values::Total total;

    void keep(const Part& part) {
        std::copy(part.out, part.out + QUERIES * HEAD, out);
        std::copy(part.peak, part.peak + QUERIES, peak);
        std::copy(part.sum, part.sum + QUERIES, sum);
        total = part.total;
    }
};

// The attention of the first rows queries of a head over all its parts, [rows, HEAD]. basis, fields: those of its values.
// sink(r): the score of the sink of a query, which has no value; minus infinity for none. lse: [rows], the log-sum-exp of
// each query's scores; null if it is not needed.
template <typename Basis, typename Sink>
inline void merge(
    const PartResult* found, int64_t parts, const Basis* basis, const values::Fields* fields, const float* table, Token* out,
    int64_t rows, Sink sink, float* lse = nullptr
) {
    values::Total total;
    float sums[QUERIES * HEAD] = {}, all[QUERIES] = {};
    for (int r = 0; r < rows; r++) {
        float high = sink(r);
        for (int64_t part = 0; part < parts; part++) high = std::max(high, found[part].peak[r]);
        all[r] = std::exp2(sink(r) - high);
        for (int64_t part = 0; part < parts; part++) {
            const PartResult& own = found[part];
            const float rescale = std::exp2(own.peak[r] - high);
            all[r] += own.sum[r] * rescale;
            total.add(own.total, r, rescale);
            for (int i = r * HEAD; i < (r + 1) * HEAD; i++) sums[i] += own.out[i] * rescale;
        }
        if (lse) lse[r] = log_sum_exp(high, all[r]);
    }
    total.put(basis, fields, table, sums);
    for (int i = 0; i < rows * HEAD; i++) round_to(out[i], attended(sums[i], all[i / HEAD]));
}

}  // namespace
