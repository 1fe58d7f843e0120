// Counts of a synthetic atlas: every value follows from the cell, the gene and the seed alone, so
// that any shard can be made by itself and any cell made twice comes out the same.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

__device__ static u32 hash32(u32 x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

struct Cell {
  u32 key;
  const float* rate;
  float depth;
};

// Types 0-7 with falling frequency; 3 % of the cells are bad: shallow, much mitochondrial RNA.
__device__ static Cell cell_of(const float* rates, const float* depths, u32 n_vars, u32 seed, i64 row) {
  Cell cell;
  cell.key = hash32((u32)row ^ seed);
  u32 a = hash32(cell.key + 1), b = hash32(cell.key + 2), c = hash32(cell.key + 3);
  u32 type = 0, share = a >> 16, limit = 19660;
  while (type < 7 && share >= limit) {
    share -= limit;
    limit = limit * 7 / 10;
    ++type;
  }
  bool bad = (b >> 16) < 1966;
  cell.rate = rates + (u64)(type + (bad ? 8 : 0)) * n_vars;
  cell.depth = depths[c >> 20] * (bad ? 0.2f : 1.0f);
  return cell;
}

__device__ static float mean_of(const Cell& cell, u32 gene) { return cell.rate[gene] * cell.depth; }

__device__ static bool expressed(const Cell& cell, u32 gene, float mean) {
  u32 h = hash32(cell.key + gene * 0x9e3779b9u);
  return (float)(h >> 8) * (1.0f / 16777216.0f) < 1.0f - __expf(-mean);
}

// A Poisson count of this mean, given that it is not zero.
__device__ static float count_of(const Cell& cell, u32 gene, float mean) {
  float u = (float)(hash32(cell.key ^ (gene * 0x85ebca6bu + 77u)) >> 8) * (1.0f / 16777216.0f);
  float term = mean * __expf(-mean) / (1.0f - __expf(-mean));
  float k = 1.0f, sum = term;
  while (u > sum && k < 500.0f) {
    k += 1.0f;
    term *= mean / k;
    sum += term;
    if (term < 1e-9f && k > mean) break;
  }
  return k;
}

// One warp a cell: how many genes it expresses.
extern "C" __global__ void count_genes(
    u64 rates, u64 depths, u32 n_vars, u32 seed, i64 first_row, i64 n_rows, u64 counts) {
  i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  u32 lane = threadIdx.x & 31u;
  if (warp >= n_rows) return;
  Cell cell = cell_of((const float*)rates, (const float*)depths, n_vars, seed, first_row + warp);
  u32 n = 0;
  for (u32 gene = lane; gene < n_vars; gene += 32) n += expressed(cell, gene, mean_of(cell, gene));
  for (u32 step = 16; step > 0; step /= 2) n += __shfl_down_sync(0xffffffffu, n, step);
  if (lane == 0) ((int*)counts)[warp] = (int)n;
}

// One warp a cell: its genes and counts, into the window [first, first + size) of all values.
extern "C" __global__ void fill_values(
    u64 rates, u64 depths, u32 n_vars, u32 seed, i64 first_row, i64 n_rows, u64 indptr, i64 first,
    i64 size, u64 data, u64 indices) {
  i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  u32 lane = threadIdx.x & 31u;
  if (warp >= n_rows) return;
  Cell cell = cell_of((const float*)rates, (const float*)depths, n_vars, seed, first_row + warp);
  i64 at = ((const i64*)indptr)[warp] - first;
  for (u32 start = 0; start < n_vars; start += 32) {
    u32 gene = start + lane;
    float mean = gene < n_vars ? mean_of(cell, gene) : 0.0f;
    bool one = gene < n_vars && expressed(cell, gene, mean);
    u32 mask = __ballot_sync(0xffffffffu, one);
    i64 to = at + __popc(mask & ((1u << lane) - 1u));
    if (one && to >= 0 && to < size) {
      ((float*)data)[to] = count_of(cell, gene, mean);
      ((u16*)indices)[to] = (u16)gene;
    }
    at += __popc(mask);
  }
}

// Copy chunks from rows of a padded array to their place in a shard, 16 bytes at a time.
extern "C" __global__ void pack(u64 source, u64 stride, u64 sizes, u64 offsets, u64 target) {
  u64 chunk = blockIdx.y, n = (((const u64*)sizes)[chunk] + 15) / 16;
  const ulonglong2* from = (const ulonglong2*)(source + chunk * stride);
  ulonglong2* to = (ulonglong2*)(target + ((const u64*)offsets)[chunk]);
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
    to[i] = from[i];
}
