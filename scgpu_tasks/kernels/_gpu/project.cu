// Scores of cells on principal components. One warp per row and 64 components (grid's y): each
// lane owns two, so that a row of loadings is read at once and no sum crosses lanes.

extern "C" __global__ void project(
    const int64* indptr, const INDEX* indices, const VALUE* data, const double* factor,
    int transform, int64 n_rows, const float* components, int n_comps, int stride,
    const double* offset, float* out) {
    const int lane = threadIdx.x & 31;
    const int comp = blockIdx.y * 64 + 2 * lane;
    for (int64 row = first_warp(); row < n_rows; row += all_warps()) {
        const int64 last = indptr[row + 1];
        const double s = transform == IDENTITY ? 1.0 : factor[row];
        double x = 0.0, y = 0.0;
        for (int64 base = indptr[row]; base < last; base += 32) {
            const int64 k = base + lane;
            const int n = (int)min((int64)32, last - base);
            const double mine = k < last ? transformed((double)data[k], s, transform) : 0.0;
            const int column = k < last ? (int)indices[k] : 0;
            #pragma unroll 4
            for (int from = 0; from < n; from++) {
                const double value = __shfl_sync(ALL_LANES, mine, from);
                const int64 at = __shfl_sync(ALL_LANES, column, from);
                const float2 loading = *(const float2*)(components + at * stride + comp);
                x = fma(value, (double)loading.x, x);
                y = fma(value, (double)loading.y, y);
            }
        }
        float* scores = out + row * n_comps;
        if (comp < n_comps) scores[comp] = (float)(x - offset[comp]);
        if (comp + 1 < n_comps) scores[comp + 1] = (float)(y - offset[comp + 1]);
    }
}
